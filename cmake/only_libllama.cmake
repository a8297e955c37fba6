# For llama-cpp-python's build, as CMAKE_ARGS="-C FILE": ggml and libllama alone, which are all that pystaged uses. Read
# twice: before the project for the cache, then in it, where this variable wins over the cache's.
set(LLAVA_BUILD OFF CACHE BOOL "")
set(CMAKE_PROJECT_llama_cpp_INCLUDE "${CMAKE_CURRENT_LIST_FILE}" CACHE FILEPATH "")
set(LLAMA_BUILD_COMMON OFF)
