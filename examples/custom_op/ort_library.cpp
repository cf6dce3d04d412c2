// acme::gated_rms_norm as a custom operator of ONNX Runtime, on the CPU; docs/guides/make/custom-ops.md says how it is used.
#define ORT_API_MANUAL_INIT
#include <onnxruntime_cxx_api.h>

#include <cmath>

struct Kernel {
  float eps;

  explicit Kernel(const OrtKernelInfo* info) : eps(Ort::ConstKernelInfo(info).GetAttribute<float>("eps")) {}

  void Compute(OrtKernelContext* given) {
    Ort::KernelContext context(given);
    const auto x = context.GetInput(0), gate = context.GetInput(1), weight = context.GetInput(2);
    const auto shape = x.GetTensorTypeAndShapeInfo().GetShape();
    const int64_t count = x.GetTensorTypeAndShapeInfo().GetElementCount(), width = shape.back();
    const float *values = x.GetTensorData<float>(), *gates = gate.GetTensorData<float>();
    const float* weights = weight.GetTensorData<float>();
    float* out = context.GetOutput(0, shape).GetTensorMutableData<float>();
    for (int64_t row = 0; row < count; row += width) {
      float squares = 0;
      for (int64_t i = row; i < row + width; i++) squares += values[i] * values[i];
      const float scale = 1 / std::sqrt(squares / width + eps);
      for (int64_t i = 0; i < width; i++)
        out[row + i] = values[row + i] * scale * weights[i] / (1 + std::exp(-gates[row + i]));
    }
  }
};

struct Operator : Ort::CustomOpBase<Operator, Kernel> {
  void* CreateKernel(const OrtApi&, const OrtKernelInfo* info) const { return new Kernel(info); }
  const char* GetName() const { return "gated_rms_norm"; }
  size_t GetInputTypeCount() const { return 3; }
  size_t GetOutputTypeCount() const { return 1; }
  ONNXTensorElementDataType GetInputType(size_t) const { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  ONNXTensorElementDataType GetOutputType(size_t) const { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
};

extern "C" OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  Ort::InitApi(base->GetApi(ORT_API_VERSION));
  static const Operator op;
  static Ort::CustomOpDomain domain("acme");
  domain.Add(&op);
  return Ort::GetApi().AddCustomOpDomain(options, domain);
}
