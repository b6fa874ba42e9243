// Rotary positions of operators: tables of angles, and where a token's angles lie in them.
#pragma once

#include "stable.hpp"

namespace bindings {

// Of parameters with batch and tokens. cosine and sine [p, d]; positions [b or 1, t or 1]; without:
// the positions after `lengths`, [b].
template <class Params>
void set_angles(const Tensor& cosine, const Tensor& sine, const OptTensor& positions,
                const int64_t* lengths, const Place& place, int32_t dtype, Params* p) {
  STD_TORCH_CHECK(cosine.dim() == 2, "cosine: expected 2 dimensions, got ", cosine.dim());
  p->angles = cosine.size(0);
  const int64_t width = cosine.size(1);
  p->cosine = contiguous_data(cosine, "cosine", place, {p->angles, width}, dtype);
  p->sine = contiguous_data(sine, "sine", place, {p->angles, width}, dtype);
  if (!positions.has_value()) {
    p->positions = lengths;
    p->position_stride[0] = p->position_step = 1;
    return;
  }
  STD_TORCH_CHECK(positions->dim() == 2, "positions: expected 2 dimensions, got ",
                  positions->dim());
  const int64_t sizes[] = {p->batch, p->tokens};
  int64_t shape[2];
  for (int axis = 0; axis < 2; ++axis) {
    shape[axis] = positions->size(axis) == 1 ? 1 : sizes[axis];
    p->position_stride[axis] = shape[axis] == 1 ? 0 : positions->stride(axis);
  }
  expect(*positions, "positions", place, {shape[0], shape[1]});
  expect_dtype(*positions, "positions", aoti_torch_dtype_int64());
  p->positions = static_cast<const int64_t*>(positions->const_data_ptr());
}

}  // namespace bindings
