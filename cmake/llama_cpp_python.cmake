# llama_cpp_python_version: the one release whose libraries are linked; pyproject.toml alone names it.
file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/../pyproject.toml" line REGEX "^ *\"llama-cpp-python==[0-9.]+\",$")
string(REGEX MATCH "[0-9]+[.][0-9.]+[0-9]" llama_cpp_python_version "${line}")
if(NOT llama_cpp_python_version)
  message(FATAL_ERROR "pyproject.toml names no version of llama-cpp-python")
endif()
