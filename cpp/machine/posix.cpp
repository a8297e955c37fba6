#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <system_error>

#include "error.h"
#include "machine/system.h"
#include "machine/topology.h"

#ifdef __linux__
#include <sched.h>
#endif
#ifdef __APPLE__
#include <sys/sysctl.h>
#endif

namespace pystaged {

void File::expect(bool holds, const char* what) const {
    require<ModelError>(holds, path_, ": ", what, ": ",
                        [error = errno] { return std::generic_category().message(error); });
}

File::File(const std::string& path, Use use) : File(path) {
    number_ = open(path.c_str(), O_CLOEXEC | (use == Use::kRead ? O_RDONLY | O_NONBLOCK : O_WRONLY | O_NOFOLLOW));
    struct stat info = {};
    expect(number_ >= 0 && fstat(number_, &info) == 0, "cannot open");
    is_regular_ = S_ISREG(info.st_mode);
    size_ = static_cast<size_t>(info.st_size);
#ifdef __APPLE__
    const timespec& changed = info.st_mtimespec;
#else
    const timespec& changed = info.st_mtim;
#endif
    changed_ = int64_t(changed.tv_sec) * 1000000000 + changed.tv_nsec;
}

File::~File() {
    if (number_ >= 0) {
        close(number_);
    }
}

size_t File::move(void* to, const void* from, size_t bytes, size_t at) const {
    const char* const what = to ? "cannot be read" : "cannot be written";
    size_t done = 0;
    for (ssize_t count = 1; count != 0 && done < bytes; done += static_cast<size_t>(std::max<ssize_t>(count, 0))) {
        const off_t place = static_cast<off_t>(at + done);
        errno = ENOSPC;  // unless the call says otherwise
        count = to ? pread(number_, static_cast<uint8_t*>(to) + done, bytes - done, place)
                   : pwrite(number_, static_cast<const uint8_t*>(from) + done, bytes - done, place);
        expect(count >= 0 || errno == EINTR, what);
    }
    expect(to || done == bytes, what);
    return done;
}

void File::prefetch(size_t at, size_t bytes) const {
#ifdef POSIX_FADV_WILLNEED
    posix_fadvise(number_, static_cast<off_t>(at), static_cast<off_t>(bytes), POSIX_FADV_WILLNEED);
#else
    (void)at, (void)bytes;
#endif
}

uint8_t* File::map(size_t bytes) const {
    void* const pages = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, number_, 0);
    expect(pages != MAP_FAILED, "cannot be mapped");
    return static_cast<uint8_t*>(pages);
}

size_t page_bytes() {
    static const size_t bytes = sysconf(_SC_PAGESIZE);
    return bytes;
}

// With the sanitizer, as strict as Windows, so that its tests find what is touched and not committed.
#ifdef __SANITIZE_ADDRESS__
constexpr bool kStrict = true;
#else
constexpr bool kStrict = false;
#endif

uint8_t* new_pages(size_t bytes) {
    void* const pages =
        mmap(nullptr, bytes, kStrict ? PROT_NONE : PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    require<std::bad_alloc>(pages != MAP_FAILED);
    return static_cast<uint8_t*>(pages);
}

void commit_pages(uint8_t* pages, size_t bytes) {
    require<std::bad_alloc>(!kStrict || mprotect(pages, bytes, PROT_READ | PROT_WRITE) == 0);
}

void free_pages(uint8_t* pages, size_t bytes) {
    munmap(pages, bytes);
}

void prefer_huge_pages(uint8_t* pages, size_t bytes) {
#ifdef MADV_HUGEPAGE
    madvise(pages, bytes, MADV_HUGEPAGE);
#else
    (void)pages, (void)bytes;
#endif
}

void empty_pages(uint8_t* pages, size_t bytes) {
#ifdef __linux__
    constexpr int kAdvice = MADV_DONTNEED;
#else
    constexpr int kAdvice = MADV_FREE;
#endif
    madvise(pages, bytes, kAdvice);
}

void call_with_stack(size_t bytes, std::function<void()> function) {
    constexpr size_t kPages = 64 << 10;  // whole ones, on every system; and one more for what the library has there
    const auto run = [](void* called) -> void* {
        (*static_cast<std::function<void()>*>(called))();
        return nullptr;
    };
    pthread_attr_t attributes;
    pthread_t thread{};
    pthread_attr_init(&attributes);
    const bool started = pthread_attr_setstacksize(&attributes, (bytes / kPages + 2) * kPages) == 0 &&
                         pthread_create(&thread, &attributes, run, &function) == 0;
    pthread_attr_destroy(&attributes);
    require<std::bad_alloc>(started);
    pthread_join(thread, nullptr);
}

#ifdef __linux__
// Where the process may run: its first thread, as others may be pinned each to a place of its own.
static bool find_allowed(cpu_set_t& allowed) {
    return sched_getaffinity(getpid(), sizeof(allowed), &allowed) == 0;
}

std::vector<Core> find_cores() {
    std::vector<int> cpus;
    cpu_set_t allowed;
    for (int cpu = 0, known = find_allowed(allowed); known && cpu < CPU_SETSIZE; ++cpu) {
        if (CPU_ISSET(cpu, &allowed)) {
            cpus.push_back(cpu);
        }
    }
    return read_cores("", cpus);
}

void prepare_worker() {
    cpu_set_t allowed;
    if (find_allowed(allowed)) {
        sched_setaffinity(0, sizeof(allowed), &allowed);
    }
}
#else
std::vector<Core> find_cores() {
    std::vector<Core> cores;
#ifdef __APPLE__
    const auto number = [](const std::string& name) {
        int value = 0;
        size_t size = sizeof(value);
        return sysctlbyname(name.c_str(), &value, &size, nullptr, 0) == 0 ? value : 0;
    };
    const int levels = number("hw.nperflevels");  // the fastest first; none on Intel
    for (int level = 0; level < levels; ++level) {
        const int count = number("hw.perflevel" + std::to_string(level) + ".physicalcpu");
        cores.insert(cores.end(), std::max(0, count), Core{1 << (levels - level)});
    }
    if (cores.empty()) {
        cores.resize(std::max(0, number("hw.physicalcpu")));
    }
#endif
    return cores;
}

void prepare_worker() {
#ifdef __APPLE__
    pthread_set_qos_class_self_np(QOS_CLASS_USER_INITIATED, 0);
#endif
}
#endif

int process_id() {
    return getpid();
}

int in_children(void (*function)()) {
    return pthread_atfork(nullptr, nullptr, function);
}

}  // namespace pystaged
