#define NOMINMAX
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
// After it, of which it is a part.
#include <fcntl.h>
#include <io.h>

#include <algorithm>
#include <new>
#include <system_error>
#include <vector>

#include "error.h"
#include "machine/system.h"
#include "machine/topology.h"

namespace pystaged {

void File::expect(bool holds, const char* what) const {
    const auto why = [error = static_cast<int>(GetLastError())] { return std::system_category().message(error); };
    require<ModelError>(holds, path_, ": ", what, ": ", why);
}

static HANDLE handle(int number) {
    return reinterpret_cast<HANDLE>(_get_osfhandle(number));
}

File::File(const std::string& path, Use use) : File(path) {
    const bool reads = use == Use::kRead;
    std::wstring name(path.size() + 1, L'\0');  // as many units at most, and the end
    expect(MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path.c_str(), -1, name.data(), int(name.size())),
           "cannot open");
    const HANDLE file = CreateFileW(name.c_str(), reads ? GENERIC_READ : GENERIC_WRITE,
                                    FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, nullptr, OPEN_EXISTING,
                                    reads ? FILE_ATTRIBUTE_NORMAL : FILE_FLAG_OPEN_REPARSE_POINT, nullptr);
    expect(file != INVALID_HANDLE_VALUE, "cannot open");
    BY_HANDLE_FILE_INFORMATION info = {};
    if (GetFileType(file) == FILE_TYPE_DISK && GetFileInformationByHandle(file, &info)) {
        is_regular_ = true;
        size_ = static_cast<size_t>(uint64_t(info.nFileSizeHigh) << 32 | info.nFileSizeLow);
        const FILETIME& changed = info.ftLastWriteTime;  // in units of 100 ns
        changed_ = static_cast<int64_t>((uint64_t(changed.dwHighDateTime) << 32 | changed.dwLowDateTime) * 100);
    }
    number_ = _open_osfhandle(reinterpret_cast<intptr_t>(file), reads ? _O_RDONLY | _O_BINARY : _O_BINARY);
    if (number_ < 0) {
        CloseHandle(file);
        SetLastError(ERROR_TOO_MANY_OPEN_FILES);
        expect(false, "cannot open");
    }
}

File::~File() {
    if (number_ >= 0) {
        _close(number_);
    }
}

size_t File::move(void* to, const void* from, size_t bytes, size_t at) const {
    const char* const what = to ? "cannot be read" : "cannot be written";
    size_t done = 0;
    for (DWORD count = 1; count > 0 && done < bytes; done += count) {
        OVERLAPPED place = {};
        place.Offset = static_cast<DWORD>(at + done);
        place.OffsetHigh = static_cast<DWORD>(uint64_t(at + done) >> 32);
        const DWORD most = static_cast<DWORD>(std::min(bytes - done, size_t(1) << 30));
        count = 0;
        SetLastError(ERROR_DISK_FULL);  // unless the call says otherwise
        const bool moved =
            to ? ReadFile(handle(number_), static_cast<uint8_t*>(to) + done, most, &count, &place)
               : WriteFile(handle(number_), static_cast<const uint8_t*>(from) + done, most, &count, &place);
        expect(moved || GetLastError() == ERROR_HANDLE_EOF, what);
    }
    expect(to || done == bytes, what);
    return done;
}

void File::prefetch(size_t, size_t) const {}

uint8_t* File::map(size_t bytes) const {
    const HANDLE mapping = CreateFileMappingW(handle(number_), nullptr, PAGE_READONLY, 0, 0, nullptr);
    expect(mapping, "cannot be mapped");
    void* const pages = MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, bytes);
    const DWORD error = GetLastError();
    CloseHandle(mapping);  // the view keeps it
    SetLastError(error);
    expect(pages, "cannot be mapped");
    return static_cast<uint8_t*>(pages);
}

size_t page_bytes() {
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return info.dwPageSize;
}

uint8_t* new_pages(size_t bytes) {
    void* const pages = VirtualAlloc(nullptr, bytes, MEM_RESERVE, PAGE_READWRITE);
    require<std::bad_alloc>(pages);
    return static_cast<uint8_t*>(pages);
}

void commit_pages(uint8_t* pages, size_t bytes) {
    require<std::bad_alloc>(VirtualAlloc(pages, bytes, MEM_COMMIT, PAGE_READWRITE));
}

void free_pages(uint8_t* pages, size_t) {
    if (!UnmapViewOfFile(pages)) {  // no file's
        VirtualFree(pages, 0, MEM_RELEASE);
    }
}

void prefer_huge_pages(uint8_t*, size_t) {}  // only for users with a privilege

void empty_pages(uint8_t* pages, size_t bytes) {
    VirtualAlloc(pages, bytes, MEM_RESET, PAGE_READWRITE);
}

void call_with_stack(size_t bytes, std::function<void()> function) {
    const LPTHREAD_START_ROUTINE run = [](void* called) -> DWORD {
        (*static_cast<std::function<void()>*>(called))();
        return 0;
    };
    const HANDLE thread = CreateThread(nullptr, bytes, run, &function, STACK_SIZE_PARAM_IS_A_RESERVATION, nullptr);
    require<std::bad_alloc>(thread);
    WaitForSingleObject(thread, INFINITE);
    CloseHandle(thread);
}

std::vector<Core> find_cores() {
    DWORD bytes = 0;
    GetLogicalProcessorInformationEx(RelationAll, nullptr, &bytes);
    std::vector<uint8_t> data(bytes);
    using Relation = SYSTEM_LOGICAL_PROCESSOR_INFORMATION_EX;
    if (!GetLogicalProcessorInformationEx(RelationAll, reinterpret_cast<Relation*>(data.data()), &bytes)) {
        return {};
    }
    const auto for_each = [&](LOGICAL_PROCESSOR_RELATIONSHIP kind, const auto& function) {
        for (size_t at = 0; at < bytes;) {
            const Relation& relation = *reinterpret_cast<const Relation*>(data.data() + at);
            at += relation.Size;
            if (relation.Relationship == kind) {
                function(relation);
            }
        }
    };
    DWORD_PTR allowed = 0, all = 0;
    GetProcessAffinityMask(GetCurrentProcess(), &allowed, &all);
    std::vector<Core> cores;
    for_each(RelationProcessorCore, [&](const Relation& relation) {
        const GROUP_AFFINITY& own = relation.Processor.GroupMask[0];
        // The mask is of the first group, and none where a process has threads in several.
        if (allowed && (own.Group != 0 || !(own.Mask & allowed))) {
            return;
        }
        Core core{1 << std::min<int>(relation.Processor.EfficiencyClass, 8)};
        int number = 0;
        for_each(RelationCache, [&](const Relation& cache) {
            const GROUP_AFFINITY& sharing = cache.Cache.GroupMask;
            if (cache.Cache.Level == 3 && sharing.Group == own.Group && (sharing.Mask & own.Mask)) {
                core.cache = number;
            }
            ++number;
        });
        cores.push_back(core);
    });
    return cores;
}

// A new thread runs wherever the process may.
void prepare_worker() {
    // Not as slowly as a window without focus.
    THREAD_POWER_THROTTLING_STATE state = {THREAD_POWER_THROTTLING_CURRENT_VERSION,
                                           THREAD_POWER_THROTTLING_EXECUTION_SPEED, 0};
    SetThreadInformation(GetCurrentThread(), ThreadPowerThrottling, &state, sizeof(state));
}

int process_id() {
    return static_cast<int>(GetCurrentProcessId());
}

int in_children(void (*)()) {
    return 0;
}

}  // namespace pystaged
