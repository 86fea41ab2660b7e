// Python objects to C++ arguments, and back. Every refusal is a TypeError or ValueError that names the argument.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>

#include "quantizer.h"

namespace nvfp4 {

inline const at::Tensor& tensor_argument(py::handle object, const char* name) {
  TORCH_CHECK_TYPE(THPVariable_Check(object.ptr()), name, ": expected a torch.Tensor, got ",
                   Py_TYPE(object.ptr())->tp_name);
  return THPVariable_Unpack(object.ptr());
}

inline const at::Tensor& optional_tensor_argument(py::handle object, const char* name) {
  static const at::Tensor undefined;
  return object.is_none() ? undefined : tensor_argument(object, name);
}

inline std::optional<at::Generator> generator_argument(py::handle object) {
  if (object.is_none()) return std::nullopt;
  TORCH_CHECK_TYPE(THPGenerator_Check(object.ptr()), "generator: expected a torch.Generator, got ",
                   Py_TYPE(object.ptr())->tp_name);
  return THPGenerator_Unwrap(object.ptr());
}

inline uint64_t unsigned_argument(py::handle object, const char* name) {
  TORCH_CHECK_TYPE(PyLong_Check(object.ptr()), name, ": expected an int, got ", Py_TYPE(object.ptr())->tp_name);
  const uint64_t value = PyLong_AsUnsignedLongLong(object.ptr());
  if (PyErr_Occurred() == nullptr) return value;
  PyErr_Clear();
  TORCH_CHECK_VALUE(false, name, ": ", std::string(py::str(object)), " is not an unsigned 64-bit number");
}

inline std::optional<RngState> rng_state_argument(py::handle object) {
  if (object.is_none()) return std::nullopt;
  TORCH_CHECK_TYPE((py::isinstance<py::tuple>(object) || py::isinstance<py::list>(object)) && py::len(object) == 2,
                   "rng_state: expected (seed, offset), got ", std::string(py::str(object)));
  const auto pair = py::reinterpret_borrow<py::sequence>(object);
  return RngState{unsigned_argument(pair[0], "rng_state: seed"), unsigned_argument(pair[1], "rng_state: offset")};
}

inline void set_amax_argument(py::handle object, CallArguments& call) {
  if (object.is_none()) return;
  if (THPVariable_Check(object.ptr())) {
    call.amax = THPVariable_Unpack(object.ptr());
    return;
  }
  const double value = PyFloat_AsDouble(object.ptr());
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    TORCH_CHECK_TYPE(false, "amax: expected a tensor or a number, got ", Py_TYPE(object.ptr())->tp_name);
  }
  call.amax_value = value;
}

// CPU work lets other threads run Python meanwhile; a launch is over sooner than the lock changes hands.
class WithoutGil {
 public:
  explicit WithoutGil(const at::Tensor& tensor) {
    if (tensor.is_cpu()) release_.emplace();
  }

 private:
  std::optional<py::gil_scoped_release> release_;
};

template <class Tensors>
py::tuple to_tuple(const Tensors& tensors) {
  py::tuple result(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    PyObject* const item = tensors[i].defined() ? THPVariable_Wrap(tensors[i]) : Py_NewRef(Py_None);
    if (item == nullptr) throw py::error_already_set();
    PyTuple_SET_ITEM(result.ptr(), i, item);
  }
  return result;
}

// pybind11 knows std exceptions only and would make each of torch's a RuntimeError.
inline void translate_torch_errors(std::exception_ptr pointer) {
  const auto raise = [](PyObject* type, const c10::Error& error) {
    PyErr_SetString(type, torch::processErrorMsg(error.what_without_backtrace()).c_str());
  };
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const c10::ValueError& error) {
    raise(PyExc_ValueError, error);
  } catch (const c10::TypeError& error) {
    raise(PyExc_TypeError, error);
  } catch (const c10::NotImplementedError& error) {
    raise(PyExc_NotImplementedError, error);
  } catch (const c10::OutOfMemoryError& error) {
    raise(py::module_::import("torch").attr("OutOfMemoryError").ptr(), error);
  } catch (const c10::Error& error) {
    raise(PyExc_RuntimeError, error);
  }
}

}  // namespace nvfp4
