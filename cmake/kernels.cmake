# pystaged_kernels: the kernels, the weights and cache they work on, and the threads they run in. It needs nothing of
# llama.cpp but ggml-base, to which the including file links it.

# Multiply-adds are fused where the source says so and nowhere else, or results would differ from one CPU to another.
set(pystaged_options -Wall -Wextra -ffp-contract=off)

find_package(Threads REQUIRED)
set(cpp "${CMAKE_CURRENT_LIST_DIR}/../cpp")
if(WIN32)
  set(system windows)
else()
  set(system posix)
endif()
add_library(pystaged_kernels STATIC
  ${cpp}/system/${system}.cpp ${cpp}/memory.cpp ${cpp}/own_math.cpp ${cpp}/thread_pool.cpp ${cpp}/packing.cpp ${cpp}/packed_matrix.cpp ${cpp}/product.cpp ${cpp}/state/kv_cache.cpp
  ${cpp}/pass/attention.cpp ${cpp}/kernels/dispatch.cpp)
target_include_directories(pystaged_kernels PUBLIC ${cpp})
target_link_libraries(pystaged_kernels PUBLIC Threads::Threads)
target_compile_options(pystaged_kernels PRIVATE ${pystaged_options})

set(PYSTAGED_KERNEL_LEVEL -O3 CACHE STRING "How far the kernels are optimized")
set(vnni -mavxvnni)
if(PYSTAGED_SANITIZE)
  set(PYSTAGED_KERNEL_LEVEL -O1)
  # The same instruction as AVX-512 encodes it, so that more machines can test it.
  set(vnni -mavx512vl -mavx512vnni)
endif()

# A build has every kernel of its architecture; only the kernel's own file is compiled for its instruction set.
function(add_kernel file)
  target_sources(pystaged_kernels PRIVATE ${cpp}/kernels/${file})
  set_source_files_properties(${cpp}/kernels/${file} PROPERTIES COMPILE_OPTIONS "${PYSTAGED_KERNEL_LEVEL};-fno-math-errno;${ARGN}")
endfunction()

add_kernel(scalar.cpp)
string(TOLOWER "${CMAKE_SYSTEM_PROCESSOR}" processor)
if(CMAKE_OSX_ARCHITECTURES)
  set(processor "${CMAKE_OSX_ARCHITECTURES}")
endif()
if(processor MATCHES "^(x86_64|amd64)$")
  target_compile_definitions(pystaged_kernels PRIVATE PYSTAGED_X86)
  target_sources(pystaged_kernels PRIVATE ${cpp}/kernels/x86_features.cpp)
  add_kernel(avx2.cpp -mavx2 -mfma -mf16c)
  add_kernel(avx_vnni.cpp -mavx2 -mfma -mf16c ${vnni})
  add_kernel(avx512_vnni.cpp -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mfma -mf16c
    -Wno-uninitialized -Wno-maybe-uninitialized)
elseif(processor MATCHES "^(aarch64|arm64)$")
  target_compile_definitions(pystaged_kernels PRIVATE PYSTAGED_ARM)
  target_sources(pystaged_kernels PRIVATE ${cpp}/kernels/arm_features.cpp)
  add_kernel(neon.cpp)
  add_kernel(neon_dotprod.cpp -march=armv8.2-a+dotprod)
  add_kernel(neon_i8mm.cpp -march=armv8.2-a+dotprod+i8mm)
endif()
