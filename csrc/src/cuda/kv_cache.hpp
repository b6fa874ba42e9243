// The CUDA backend of the operators of polyspec/kv_cache.hpp.
#pragma once

#include "polyspec/kv_cache.hpp"

namespace polyspec::cuda {

// Arguments are checked already (kv_cache.cpp). Each is one launch on the stream.
Result append(const AppendParams& params, CUstream_st* stream);
Result append_paged(const PagedAppendParams& params, CUstream_st* stream);
Result reserve_pages(const PagesParams& params, CUstream_st* stream);
Result truncate_pages(const PagesParams& params, CUstream_st* stream);
Result update_lengths(const LengthsParams& params, CUstream_st* stream);
Result copy_rows(const CopyRowsParams& params, CUstream_st* stream);
Result compact_tree(const CompactTreeParams& params, CUstream_st* stream);

}  // namespace polyspec::cuda
