#define NOMINMAX
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
// After it, of which it is a part.
#include <fcntl.h>
#include <io.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <new>
#include <system_error>
#include <vector>

#include "machine/system.h"
#include "machine/topology.h"

namespace pystaged {

namespace {

[[noreturn]] void fail() {
    throw std::system_error(static_cast<int>(GetLastError()), std::system_category());
}

HANDLE handle(int number) {
    return reinterpret_cast<HANDLE>(_get_osfhandle(number));
}

// Where a transfer begins, and how much of it one call takes.
OVERLAPPED place(size_t at) {
    OVERLAPPED result = {};
    result.Offset = static_cast<DWORD>(at);
    result.OffsetHigh = static_cast<DWORD>(static_cast<uint64_t>(at) >> 32);
    return result;
}

DWORD portion(size_t bytes) {
    return static_cast<DWORD>(std::min(bytes, size_t(1) << 30));
}

}  // namespace

File::File(const std::string& path, Use use) {
    const bool reads = use == Use::kRead;
    const HANDLE file = CreateFileW(std::filesystem::u8path(path).c_str(), reads ? GENERIC_READ : GENERIC_WRITE,
                                    FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, nullptr, OPEN_EXISTING,
                                    reads ? FILE_ATTRIBUTE_NORMAL : FILE_FLAG_OPEN_REPARSE_POINT, nullptr);
    if (file == INVALID_HANDLE_VALUE) {
        fail();
    }
    BY_HANDLE_FILE_INFORMATION info = {};
    if (GetFileType(file) == FILE_TYPE_DISK && GetFileInformationByHandle(file, &info)) {
        is_regular_ = true;
        size_ = static_cast<size_t>(uint64_t(info.nFileSizeHigh) << 32 | info.nFileSizeLow);
        // In units of 100 ns.
        const FILETIME& changed = info.ftLastWriteTime;
        changed_ = static_cast<int64_t>((uint64_t(changed.dwHighDateTime) << 32 | changed.dwLowDateTime) * 100);
    }
    number_ = _open_osfhandle(reinterpret_cast<intptr_t>(file), reads ? _O_RDONLY | _O_BINARY : _O_BINARY);
    if (number_ < 0) {
        CloseHandle(file);
        throw std::system_error(errno, std::generic_category());
    }
}

File::~File() {
    _close(number_);
}

size_t File::read(void* data, size_t bytes, size_t at) const {
    size_t done = 0;
    while (done < bytes) {
        OVERLAPPED from = place(at + done);
        DWORD count = 0;
        if (!ReadFile(handle(number_), static_cast<uint8_t*>(data) + done, portion(bytes - done), &count, &from) &&
            GetLastError() != ERROR_HANDLE_EOF) {
            fail();
        }
        if (count == 0) {
            break;
        }
        done += count;
    }
    return done;
}

void File::write(const void* data, size_t bytes, size_t at) const {
    for (size_t done = 0; done < bytes;) {
        OVERLAPPED to = place(at + done);
        DWORD count = 0;
        if (!WriteFile(handle(number_), static_cast<const uint8_t*>(data) + done, portion(bytes - done), &count, &to)) {
            fail();
        }
        done += count;
    }
}

void File::prefetch(size_t, size_t) const {}

uint8_t* File::map(size_t bytes) const {
    const HANDLE mapping = CreateFileMappingW(handle(number_), nullptr, PAGE_READONLY, 0, 0, nullptr);
    if (!mapping) {
        fail();
    }
    void* const pages = MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, bytes);
    const DWORD error = GetLastError();
    CloseHandle(mapping);  // the view keeps it
    if (!pages) {
        throw std::system_error(static_cast<int>(error), std::system_category());
    }
    return static_cast<uint8_t*>(pages);
}

std::unique_ptr<FILE, File::Close> File::stream() const {
    const int copy = _dup(number_);
    FILE* const stream = copy < 0 ? nullptr : _fdopen(copy, "rb");
    if (!stream) {
        const int error = errno;
        if (copy >= 0) {
            _close(copy);
        }
        throw std::system_error(error, std::generic_category());
    }
    return std::unique_ptr<FILE, Close>(stream);
}

size_t page_bytes() {
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return info.dwPageSize;
}

uint8_t* new_pages(size_t bytes) {
    void* const pages = VirtualAlloc(nullptr, bytes, MEM_RESERVE, PAGE_READWRITE);
    if (!pages) {
        throw std::bad_alloc();
    }
    return static_cast<uint8_t*>(pages);
}

void commit_pages(uint8_t* pages, size_t bytes) {
    if (!VirtualAlloc(pages, bytes, MEM_COMMIT, PAGE_READWRITE)) {
        throw std::bad_alloc();
    }
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

void call_with_stack(size_t bytes, void (*function)(void*), void* data) {
    struct Call {
        void (*function)(void*);
        void* data;
    } call{function, data};
    const LPTHREAD_START_ROUTINE run = [](void* given) -> DWORD {
        const Call& call = *static_cast<Call*>(given);
        call.function(call.data);
        return 0;
    };
    const HANDLE thread = CreateThread(nullptr, bytes, run, &call, STACK_SIZE_PARAM_IS_A_RESERVATION, nullptr);
    if (!thread) {
        throw std::bad_alloc();
    }
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
