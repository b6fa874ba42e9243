// The CPU backend of the operators of polyspec/kv_cache.hpp.
#pragma once

#include "polyspec/kv_cache.hpp"

namespace polyspec::cpu {

// Arguments are checked already (kv_cache.cpp).
void append(const AppendParams& params, const Executor& executor);
void append_paged(const PagedAppendParams& params, const Executor& executor);
void copy_rows(const CopyRowsParams& params, const Executor& executor);
void reserve_pages(const PagesParams& params);
void truncate_pages(const PagesParams& params);
void compact_tree(const CompactTreeParams& params, const Executor& executor);

}  // namespace polyspec::cpu
