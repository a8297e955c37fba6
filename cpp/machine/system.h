// What systems do in ways of their own: files, memory, threads and processes. posix.cpp and windows.cpp have it all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace pystaged {

// A file that exists, read or written at any place by any thread. Everything throws ModelError, with the path and why.
class File {
public:
    enum class Use { kRead, kWrite };

    // Opens it without waiting for a pipe's other end, and for writing without following a link. Others may rename and
    // remove it meanwhile. The path is in UTF-8 on Windows.
    File(const std::string& path, Use use);
    ~File();
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    bool is_regular() const { return is_regular_; }
    // As it was opened.
    size_t size() const { return size_; }
    int64_t changed() const { return changed_; }  // nanoseconds, of any clock

    // Returns how many bytes there are: fewer than asked for only at the end of the file.
    size_t read(void* data, size_t bytes, size_t at) const { return move(data, nullptr, bytes, at); }
    void write(const void* data, size_t bytes, size_t at) const { move(nullptr, data, bytes, at); }
    // Asks the system to begin reading from the disk.
    void prefetch(size_t at, size_t bytes) const;
    // Its first bytes in memory, to be given back by free_pages(); nobody may write to it.
    uint8_t* map(size_t bytes) const;

private:
    // Closed, so that the destructor runs where opening throws.
    explicit File(const std::string& path) : path_(path) {}
    // Reads to memory, or writes from it; one of the two is null.
    size_t move(void* to, const void* from, size_t bytes, size_t at) const;
    // Throws what the last call of the system failed for.
    void expect(bool holds, const char* what) const;

    std::string path_;
    int number_ = -1;
    bool is_regular_ = false;
    size_t size_ = 0;
    int64_t changed_ = 0;
};

size_t page_bytes();
// Zeros that take memory where they are touched, after they are committed: Windows counts those against its limit, as
// if all were touched. Both throw std::bad_alloc; committing pages again leaves them as they are.
uint8_t* new_pages(size_t bytes);
void commit_pages(uint8_t* pages, size_t bytes);
void free_pages(uint8_t* pages, size_t bytes);
void prefer_huge_pages(uint8_t* pages, size_t bytes);
// Gives their memory back to the system. What they held, or zeros, is there afterwards.
void empty_pages(uint8_t* pages, size_t bytes);

// Calls a function in a thread with a stack of at least that size, which takes memory only where it is touched and ends
// at a page that nobody may touch. Throws std::bad_alloc where there is no thread to be had; the function must not
// throw.
void call_with_stack(size_t bytes, std::function<void()> function);

// Lets the thread that calls it run wherever the process may, whoever started it, and as what somebody waits for.
void prepare_worker();

int process_id();
// Has `function` called in every child of fork(), on systems that have it. Returns 0.
int in_children(void (*function)());

}  // namespace pystaged
