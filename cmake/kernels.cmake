# pystaged_kernels: the kernels, the weights and cache they work on, and the threads they run in. It needs nothing of
# llama.cpp but ggml-base, to which the including file links it.

set(pystaged_options -Wall -Wextra)

find_package(Threads REQUIRED)
set(cpp "${CMAKE_CURRENT_LIST_DIR}/../cpp")
if(WIN32)
  set(system windows)
else()
  set(system posix)
endif()
add_library(pystaged_kernels STATIC
  ${cpp}/kernels/dispatch.cpp ${cpp}/machine/${system}.cpp ${cpp}/machine/math.cpp ${cpp}/machine/topology.cpp
  ${cpp}/weights/packing.cpp ${cpp}/pass/attention.cpp)
target_include_directories(pystaged_kernels PUBLIC ${cpp})
target_link_libraries(pystaged_kernels PUBLIC Threads::Threads)
target_compile_options(pystaged_kernels PRIVATE ${pystaged_options})
# Multiply-adds are fused where the source says so and nowhere else, or results would differ from one CPU to another;
# headers compute, too.
target_compile_options(pystaged_kernels PUBLIC -ffp-contract=off)

set(PYSTAGED_KERNEL_LEVEL -O3 CACHE STRING "How far the kernels are optimized")
set(vnni -mavxvnni)
if(PYSTAGED_SANITIZE)
  set(PYSTAGED_KERNEL_LEVEL -O1)
  # The same instruction as AVX-512 encodes it, so that more machines can test it.
  set(vnni -mavx512vl -mavx512vnni)
endif()

# From source as llama-cpp-python is, for the machine that builds; what is to run elsewhere needs all kernels.
set(PYSTAGED_KERNELS native CACHE STRING "native: the kernel of this machine and the scalar one; all: those of its architecture")
if(DEFINED ENV{PYSTAGED_KERNELS})
  set(PYSTAGED_KERNELS "$ENV{PYSTAGED_KERNELS}")
endif()
if(NOT PYSTAGED_KERNELS MATCHES "^(native|all)$")
  message(FATAL_ERROR "PYSTAGED_KERNELS is native or all, not ${PYSTAGED_KERNELS}")
endif()
# Threads are the same with every kernel.
if(PYSTAGED_KERNELS STREQUAL "all" OR CMAKE_CROSSCOMPILING OR PYSTAGED_SANITIZE MATCHES "address")
  set(kernel_of_this_machine)
elseif(NOT DEFINED kernel_of_this_machine)
  try_run(status compiles "${CMAKE_CURRENT_BINARY_DIR}/kernel_of_this_machine"
    "${CMAKE_CURRENT_LIST_DIR}/kernel_of_this_machine.cpp" RUN_OUTPUT_VARIABLE printed)
  if(compiles AND status EQUAL 0)
    string(STRIP "${printed}" printed)
    set(kernel_of_this_machine "${printed}" CACHE INTERNAL "")
  endif()
endif()

# Only a kernel's own file is compiled for its instruction set.
set(kernels)
function(add_kernel name symbol)
  if(name MATCHES "^(scalar|${kernel_of_this_machine})$" OR NOT kernel_of_this_machine)
    string(REPLACE "-" "_" file "${name}")
    target_sources(pystaged_kernels PRIVATE ${cpp}/kernels/${file}.cpp)
    set_source_files_properties(${cpp}/kernels/${file}.cpp PROPERTIES
      COMPILE_OPTIONS "${PYSTAGED_KERNEL_LEVEL};-fno-math-errno;${ARGN}")
    set(kernels ${kernels} ${symbol} PARENT_SCOPE)
  endif()
endfunction()

# Best first.
string(TOLOWER "${CMAKE_SYSTEM_PROCESSOR}" processor)
if(CMAKE_OSX_ARCHITECTURES)
  set(processor "${CMAKE_OSX_ARCHITECTURES}")
endif()
if(processor MATCHES "^(x86_64|amd64)$")
  target_sources(pystaged_kernels PRIVATE ${cpp}/kernels/x86_features.cpp)
  add_kernel(avx512-vnni kAvx512VnniKernel -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mfma -mf16c
    -Wno-uninitialized -Wno-maybe-uninitialized)
  add_kernel(avx-vnni kAvxVnniKernel -mavx2 -mfma -mf16c ${vnni})
  add_kernel(avx2 kAvx2Kernel -mavx2 -mfma -mf16c)
elseif(processor MATCHES "^(aarch64|arm64)$")
  target_sources(pystaged_kernels PRIVATE ${cpp}/kernels/arm_features.cpp)
  add_kernel(neon-i8mm kNeonI8mmKernel -march=armv8.2-a+dotprod+i8mm)
  add_kernel(neon-dotprod kNeonDotprodKernel -march=armv8.2-a+dotprod)
  add_kernel(neon kNeonKernel)
endif()
add_kernel(scalar kScalarKernel)
list(JOIN kernels "," kernels)
message(STATUS "Kernels: ${kernels}")
set_source_files_properties(${cpp}/kernels/dispatch.cpp PROPERTIES COMPILE_DEFINITIONS "PYSTAGED_KERNELS=${kernels}")
