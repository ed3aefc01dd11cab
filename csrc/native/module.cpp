// Python module deadpool_ext._native: checksums, a pool of copying threads, and atomic words in shared
// memory. Knows CPython only.
//
// Atomic words live in a writable buffer (an mmap of a memfd) at naturally aligned offsets; loads acquire, stores
// release, read-modify-write operations do both. The memory may be shared with processes that die at any instruction.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

#include "copy_type.hpp"
#include "crc32c.hpp"

namespace {

// Below this the switch of the GIL costs more than the work.
constexpr Py_ssize_t kReleaseGilAbove = 16 * 1024;

class Buffer {
 public:
  Buffer(PyObject* object, int flags) { ok_ = PyObject_GetBuffer(object, &view_, flags) == 0; }
  ~Buffer() {
    if (ok_) PyBuffer_Release(&view_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  bool ok() const { return ok_; }
  char* data() const { return static_cast<char*>(view_.buf); }
  Py_ssize_t nbytes() const { return view_.len; }

 private:
  Py_buffer view_{};
  bool ok_ = false;
};

bool expect_arguments(Py_ssize_t given, Py_ssize_t least, Py_ssize_t most) {
  if (given >= least && given <= most) return true;
  PyErr_Format(PyExc_TypeError, "expected %zd to %zd arguments, got %zd", least, most, given);
  return false;
}

bool unsigned_argument(PyObject* object, std::uint64_t most, std::uint64_t* value) {
  const unsigned long long number = PyLong_AsUnsignedLongLong(object);
  if (number == static_cast<unsigned long long>(-1) && PyErr_Occurred()) return false;
  if (number > most) {
    PyErr_SetString(PyExc_OverflowError, "number too large");
    return false;
  }
  *value = number;
  return true;
}

template <typename Function>
PyObject* checksum(PyObject* const* args, Py_ssize_t nargs, Function function) {
  if (!expect_arguments(nargs, 1, 2)) return nullptr;
  std::uint64_t init = 0;
  if (nargs == 2 && !unsigned_argument(args[1], UINT32_MAX, &init)) return nullptr;
  Buffer buffer(args[0], PyBUF_SIMPLE);
  if (!buffer.ok()) return nullptr;
  std::uint32_t crc = 0;
  if (buffer.nbytes() > kReleaseGilAbove) {
    Py_BEGIN_ALLOW_THREADS;
    crc = function(buffer.data(), static_cast<std::size_t>(buffer.nbytes()), static_cast<std::uint32_t>(init));
    Py_END_ALLOW_THREADS;
  } else {
    crc = function(buffer.data(), static_cast<std::size_t>(buffer.nbytes()), static_cast<std::uint32_t>(init));
  }
  return PyLong_FromUnsignedLong(crc);
}

PyObject* py_crc32c(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  return checksum(args, nargs, deadpool::crc32c);
}

PyObject* py_crc32c_portable(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  return checksum(args, nargs, deadpool::crc32c_portable);
}

PyObject* py_crc32c_combine(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  std::uint64_t first = 0;
  std::uint64_t second = 0;
  std::uint64_t nbytes = 0;
  if (!expect_arguments(nargs, 3, 3) || !unsigned_argument(args[0], UINT32_MAX, &first) ||
      !unsigned_argument(args[1], UINT32_MAX, &second) || !unsigned_argument(args[2], UINT64_MAX, &nbytes)) {
    return nullptr;
  }
  return PyLong_FromUnsignedLong(deadpool::crc32c_combine(static_cast<std::uint32_t>(first),
                                                          static_cast<std::uint32_t>(second), nbytes));
}

PyObject* py_crc32c_backend(PyObject*, PyObject*) { return PyUnicode_FromString(deadpool::crc32c_backend()); }

PyObject* py_copy_crc32c(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  std::uint64_t to = 0;
  std::uint64_t from = 0;
  std::uint64_t nbytes = 0;
  std::uint64_t init = 0;
  if (!expect_arguments(nargs, 3, 4) || !unsigned_argument(args[0], UINTPTR_MAX, &to) ||
      !unsigned_argument(args[1], UINTPTR_MAX, &from) || !unsigned_argument(args[2], SIZE_MAX, &nbytes) ||
      (nargs == 4 && !unsigned_argument(args[3], UINT32_MAX, &init))) {
    return nullptr;
  }
  if (nbytes > 0 && (to == 0 || from == 0)) {
    PyErr_SetString(PyExc_ValueError, "null address");
    return nullptr;
  }
  std::uint32_t crc = 0;
  Py_BEGIN_ALLOW_THREADS;
  crc = deadpool::copy_crc32c(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from),
                              static_cast<std::size_t>(nbytes), static_cast<std::uint32_t>(init));
  Py_END_ALLOW_THREADS;
  return PyLong_FromUnsignedLong(crc);
}

PyObject* py_address_of(PyObject*, PyObject* object) {
  Buffer buffer(object, PyBUF_SIMPLE);
  if (!buffer.ok()) return nullptr;
  return PyLong_FromVoidPtr(buffer.data());
}

// Points at the aligned word of type T inside the buffer, or sets an error.
template <typename T>
T* word(const Buffer& buffer, PyObject* offset_object) {
  if (!buffer.ok()) return nullptr;
  std::uint64_t offset = 0;
  if (!unsigned_argument(offset_object, INT64_MAX, &offset)) return nullptr;
  if (offset + sizeof(T) > static_cast<std::uint64_t>(buffer.nbytes())) {
    PyErr_SetString(PyExc_IndexError, "word outside the buffer");
    return nullptr;
  }
  char* address = buffer.data() + offset;
  if (reinterpret_cast<std::uintptr_t>(address) % sizeof(T) != 0) {
    PyErr_SetString(PyExc_ValueError, "word is not aligned");
    return nullptr;
  }
  return reinterpret_cast<T*>(address);
}

template <typename T>
PyObject* load(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  if (!expect_arguments(nargs, 2, 2)) return nullptr;
  Buffer buffer(args[0], PyBUF_SIMPLE);
  T* at = word<T>(buffer, args[1]);
  if (at == nullptr) return nullptr;
  return PyLong_FromUnsignedLongLong(__atomic_load_n(at, __ATOMIC_ACQUIRE));
}

template <typename T>
PyObject* store(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  if (!expect_arguments(nargs, 3, 3)) return nullptr;
  std::uint64_t value = 0;
  if (!unsigned_argument(args[2], static_cast<T>(~T{0}), &value)) return nullptr;
  Buffer buffer(args[0], PyBUF_WRITABLE);
  T* at = word<T>(buffer, args[1]);
  if (at == nullptr) return nullptr;
  __atomic_store_n(at, static_cast<T>(value), __ATOMIC_RELEASE);
  Py_RETURN_NONE;
}

template <typename T>
PyObject* compare_exchange(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  if (!expect_arguments(nargs, 4, 4)) return nullptr;
  std::uint64_t expected = 0;
  std::uint64_t desired = 0;
  if (!unsigned_argument(args[2], static_cast<T>(~T{0}), &expected) ||
      !unsigned_argument(args[3], static_cast<T>(~T{0}), &desired)) {
    return nullptr;
  }
  Buffer buffer(args[0], PyBUF_WRITABLE);
  T* at = word<T>(buffer, args[1]);
  if (at == nullptr) return nullptr;
  T found = static_cast<T>(expected);
  const bool swapped = __atomic_compare_exchange_n(at, &found, static_cast<T>(desired), /*weak=*/false,
                                                   __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return PyBool_FromLong(swapped);
}

template <typename T>
PyObject* fetch_add(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  if (!expect_arguments(nargs, 3, 3)) return nullptr;
  std::uint64_t value = 0;
  if (!unsigned_argument(args[2], static_cast<T>(~T{0}), &value)) return nullptr;
  Buffer buffer(args[0], PyBUF_WRITABLE);
  T* at = word<T>(buffer, args[1]);
  if (at == nullptr) return nullptr;
  return PyLong_FromUnsignedLongLong(__atomic_fetch_add(at, static_cast<T>(value), __ATOMIC_ACQ_REL));
}

template <typename Function>
PyCFunction fast(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"crc32c", fast(py_crc32c), METH_FASTCALL, "crc32c(buffer, init=0, /) -> int"},
    {"crc32c_portable", fast(py_crc32c_portable), METH_FASTCALL, "crc32c_portable(buffer, init=0, /) -> int"},
    {"crc32c_combine", fast(py_crc32c_combine), METH_FASTCALL, "crc32c_combine(first, second, second_nbytes, /) -> int"},
    {"crc32c_backend", py_crc32c_backend, METH_NOARGS, "crc32c_backend() -> str"},
    {"copy_crc32c", fast(py_copy_crc32c), METH_FASTCALL, "copy_crc32c(dst_addr, src_addr, nbytes, init=0, /) -> int"},
    {"address_of", py_address_of, METH_O, "address_of(buffer, /) -> int"},
    {"load_u64", fast(load<std::uint64_t>), METH_FASTCALL, "load_u64(buffer, offset, /) -> int"},
    {"load_u32", fast(load<std::uint32_t>), METH_FASTCALL, "load_u32(buffer, offset, /) -> int"},
    {"store_u64", fast(store<std::uint64_t>), METH_FASTCALL, "store_u64(buffer, offset, value, /) -> None"},
    {"store_u32", fast(store<std::uint32_t>), METH_FASTCALL, "store_u32(buffer, offset, value, /) -> None"},
    {"compare_exchange_u64", fast(compare_exchange<std::uint64_t>), METH_FASTCALL,
     "compare_exchange_u64(buffer, offset, expected, desired, /) -> bool"},
    {"compare_exchange_u32", fast(compare_exchange<std::uint32_t>), METH_FASTCALL,
     "compare_exchange_u32(buffer, offset, expected, desired, /) -> bool"},
    {"fetch_add_u64", fast(fetch_add<std::uint64_t>), METH_FASTCALL, "fetch_add_u64(buffer, offset, value, /) -> int"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_native", "Checksums and atomic words in shared memory.", 0, methods,
    nullptr,               nullptr,   nullptr,                                        nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
  PyObject* made = PyModule_Create(&module);
  if (made != nullptr && add_copy_types(made) < 0) {
    Py_DECREF(made);
    return nullptr;
  }
  return made;
}
