#include "copy_type.hpp"

#include <cmath>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <vector>

#include "copy_pool.hpp"

namespace {

using deadpool::CopyJob;
using deadpool::CopyOptions;
using deadpool::CopyPool;
using deadpool::Source;

struct PoolObject {
  PyObject_HEAD std::shared_ptr<CopyPool> pool;
};

struct JobObject {
  PyObject_HEAD std::shared_ptr<CopyPool> pool;
  std::shared_ptr<CopyJob> job;
};

PyTypeObject* job_type = nullptr;

PoolObject* as_pool(PyObject* self) { return reinterpret_cast<PoolObject*>(self); }
JobObject* as_job(PyObject* self) { return reinterpret_cast<JobObject*>(self); }

PyObject* pool_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"threads", "name", "nice", nullptr};
  unsigned int threads = 1;
  const char* name = "dp-copy";
  int nice = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|Isi", const_cast<char**>(names), &threads, &name, &nice)) {
    return nullptr;
  }
  if (threads < 1 || threads > 64) {
    PyErr_SetString(PyExc_ValueError, "threads must be 1 to 64");
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  new (&as_pool(self)->pool) std::shared_ptr<CopyPool>();
  try {
    as_pool(self)->pool = std::make_shared<CopyPool>(threads, name, nice);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_OSError, error.what());
    Py_DECREF(self);
    return nullptr;
  }
  return self;
}

void pool_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  std::shared_ptr<CopyPool> pool = std::move(as_pool(self)->pool);
  as_pool(self)->pool.~shared_ptr();
  Py_BEGIN_ALLOW_THREADS;
  pool.reset();  // may wait for a chunk
  Py_END_ALLOW_THREADS;
  type->tp_free(self);
  Py_DECREF(type);
}

// [(address, nbytes), ...]
bool read_sources(PyObject* object, std::vector<Source>* sources) {
  PyObject* list = PySequence_Fast(object, "sources must be a sequence of (address, nbytes)");
  if (list == nullptr) return false;
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(list);
  bool fine = true;
  for (Py_ssize_t index = 0; fine && index < count; ++index) {
    unsigned long long address = 0;
    unsigned long long nbytes = 0;
    PyObject* item = PySequence_Fast_GET_ITEM(list, index);
    fine = PyTuple_Check(item) && PyArg_ParseTuple(item, "KK", &address, &nbytes);
    if (!fine && !PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "sources must be (address, nbytes)");
    if (fine && nbytes > 0 && address == 0) {
      PyErr_SetString(PyExc_ValueError, "null address");
      fine = false;
    }
    if (fine) sources->push_back({reinterpret_cast<const unsigned char*>(address), static_cast<std::size_t>(nbytes)});
  }
  Py_DECREF(list);
  return fine;
}

PyObject* pool_submit(PyObject* self, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"destination", "sources", "chunk_bytes", "non_temporal", "allowed", nullptr};
  unsigned long long destination = 0;
  PyObject* listed = nullptr;
  unsigned long long chunk_bytes = CopyOptions{}.chunk_bytes;
  int non_temporal = 0;
  unsigned long long allowed = UINT64_MAX;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KO|KpK", const_cast<char**>(names), &destination, &listed,
                                   &chunk_bytes, &non_temporal, &allowed)) {
    return nullptr;
  }
  std::vector<Source> sources;
  if (!read_sources(listed, &sources)) return nullptr;
  if (destination == 0 || chunk_bytes == 0) {
    PyErr_SetString(PyExc_ValueError, destination == 0 ? "null address" : "chunk_bytes must be positive");
    return nullptr;
  }
  CopyOptions options;
  options.chunk_bytes = chunk_bytes;
  options.non_temporal = non_temporal != 0;
  options.allowed_bytes = allowed;
  std::shared_ptr<CopyJob> job;
  try {
    job = as_pool(self)->pool->submit(reinterpret_cast<unsigned char*>(destination), sources, options);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  PyObject* made = job_type->tp_alloc(job_type, 0);
  if (made == nullptr) return nullptr;
  new (&as_job(made)->pool) std::shared_ptr<CopyPool>(as_pool(self)->pool);
  new (&as_job(made)->job) std::shared_ptr<CopyJob>(std::move(job));
  return made;
}

PyObject* pool_pause(PyObject* self, PyObject*) {
  as_pool(self)->pool->pause(true);
  Py_RETURN_NONE;
}

PyObject* pool_resume(PyObject* self, PyObject*) {
  as_pool(self)->pool->pause(false);
  Py_RETURN_NONE;
}

PyObject* pool_limit(PyObject* self, PyObject* argument) {
  const double rate = PyFloat_AsDouble(argument);
  if (PyErr_Occurred()) return nullptr;
  if (!(rate >= 0.0) || std::isinf(rate)) {
    PyErr_SetString(PyExc_ValueError, "bytes a second must be finite and not negative");
    return nullptr;
  }
  as_pool(self)->pool->limit(rate);
  Py_RETURN_NONE;
}

PyObject* pool_close(PyObject* self, PyObject*) {
  Py_BEGIN_ALLOW_THREADS;
  as_pool(self)->pool->close();
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

void job_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  std::shared_ptr<CopyPool> pool = std::move(as_job(self)->pool);
  as_job(self)->pool.~shared_ptr();
  as_job(self)->job.~shared_ptr();
  Py_BEGIN_ALLOW_THREADS;
  pool.reset();
  Py_END_ALLOW_THREADS;
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* job_wait(PyObject* self, PyObject* argument) {
  const double timeout = PyFloat_AsDouble(argument);
  if (PyErr_Occurred()) return nullptr;
  if (!(timeout >= 0.0) || timeout > 1e9) {
    PyErr_SetString(PyExc_ValueError, "timeout must be 0 to 1e9 seconds");
    return nullptr;
  }
  bool ended = false;
  Py_BEGIN_ALLOW_THREADS;
  ended = as_job(self)->pool->wait(*as_job(self)->job, std::chrono::duration<double>(timeout));
  Py_END_ALLOW_THREADS;
  return PyBool_FromLong(ended);
}

PyObject* job_cancel(PyObject* self, PyObject*) {
  as_job(self)->pool->cancel(*as_job(self)->job);
  Py_RETURN_NONE;
}

PyObject* job_allow(PyObject* self, PyObject* argument) {
  const unsigned long long nbytes = PyLong_AsUnsignedLongLong(argument);
  if (nbytes == static_cast<unsigned long long>(-1) && PyErr_Occurred()) return nullptr;
  as_job(self)->pool->allow(*as_job(self)->job, nbytes);
  Py_RETURN_NONE;
}

PyObject* job_progress(PyObject* self, PyObject*) {
  const deadpool::Progress progress = as_job(self)->pool->progress(*as_job(self)->job);
  return Py_BuildValue("(KI)", static_cast<unsigned long long>(progress.nbytes), progress.crc);
}

PyObject* job_times(PyObject* self, PyObject*) {
  JobObject* object = as_job(self);
  if (!object->pool->wait(*object->job, std::chrono::duration<double>(0))) {
    PyErr_SetString(PyExc_RuntimeError, "the copy has not ended");
    return nullptr;
  }
  return Py_BuildValue("(dd)", object->job->seconds, object->job->cpu_seconds);
}

PyMethodDef pool_methods[] = {
    {"submit", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(pool_submit)), METH_VARARGS | METH_KEYWORDS,
     "submit(destination, sources, chunk_bytes=4194304, non_temporal=False, allowed=2**64-1) -> CopyJob"},
    {"pause", pool_pause, METH_NOARGS, "pause() -> None"},
    {"resume", pool_resume, METH_NOARGS, "resume() -> None"},
    {"limit", pool_limit, METH_O, "limit(bytes_per_second, /) -> None"},
    {"close", pool_close, METH_NOARGS, "close() -> None"},
    {nullptr, nullptr, 0, nullptr},
};

PyMethodDef job_methods[] = {
    {"wait", job_wait, METH_O, "wait(timeout_s, /) -> bool"},
    {"cancel", job_cancel, METH_NOARGS, "cancel() -> None"},
    {"allow", job_allow, METH_O, "allow(nbytes, /) -> None"},
    {"progress", job_progress, METH_NOARGS, "progress() -> tuple[int, int]"},
    {"times", job_times, METH_NOARGS, "times() -> tuple[float, float]"},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot pool_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(pool_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(pool_dealloc)},
    {Py_tp_methods, pool_methods},
    {0, nullptr},
};
PyType_Slot job_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(job_dealloc)},
    {Py_tp_methods, job_methods},
    {0, nullptr},
};
PyType_Spec pool_spec = {"deadpool_ext._native.CopyPool", sizeof(PoolObject), 0, Py_TPFLAGS_DEFAULT, pool_slots};
PyType_Spec job_spec = {"deadpool_ext._native.CopyJob", sizeof(JobObject), 0,
                        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, job_slots};

int add_type(PyObject* module, PyType_Spec* spec, PyTypeObject** type) {
  PyObject* made = PyType_FromSpec(spec);
  if (made == nullptr) return -1;
  *type = reinterpret_cast<PyTypeObject*>(made);
  const int added = PyModule_AddType(module, *type);
  if (added < 0) Py_DECREF(made);
  return added;
}

}  // namespace

int add_copy_types(PyObject* module) {
  static PyTypeObject* pool_type = nullptr;
  if (add_type(module, &pool_spec, &pool_type) < 0) return -1;
  return add_type(module, &job_spec, &job_type);
}
