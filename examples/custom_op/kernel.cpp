// A CPU kernel of acme::gated_rms_norm for PyTorch; docs/guides/make/custom-ops.md says how it is used.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor gated_rms_norm(Tensor x, Tensor gate, Tensor weight, double eps) {
  for (const Tensor& tensor : {x, gate, weight}) {
    STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Float && tensor.is_contiguous(), "contiguous float32 only");
  }
  Tensor result = torch::stable::empty_like(x);
  const int64_t width = x.size(-1), rows = x.numel() / width;
  const float* weights = weight.const_data_ptr<float>();
  for (int64_t row = 0; row < rows; row++) {
    const float* values = x.const_data_ptr<float>() + row * width;
    const float* gates = gate.const_data_ptr<float>() + row * width;
    float* out = result.mutable_data_ptr<float>() + row * width;
    float squares = 0;
    for (int64_t i = 0; i < width; i++) squares += values[i] * values[i];
    const float scale = 1 / std::sqrt(squares / width + static_cast<float>(eps));
    for (int64_t i = 0; i < width; i++) out[i] = values[i] * scale * weights[i] / (1 + std::exp(-gates[i]));
  }
  return result;
}

STABLE_TORCH_LIBRARY_IMPL(acme, CPU, m) { m.impl("gated_rms_norm", TORCH_BOX(&gated_rms_norm)); }
