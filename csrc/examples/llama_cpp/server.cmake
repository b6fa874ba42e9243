# For `make llama-server`. _tile_loadconfig of GCC 12 names 8 of the 64 bytes that it reads, so that
# stores of the others are removed, and the first product by AMX is a fault.
cmake_language(DEFER CALL set_source_files_properties ggml/src/ggml-cpu/amx/mmq.cpp
  DIRECTORY ggml/src PROPERTIES COMPILE_OPTIONS "-fno-tree-dse;-fno-dse")
