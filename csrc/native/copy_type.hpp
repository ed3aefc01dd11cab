// The Python types CopyPool and CopyJob of deadpool_ext._native.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

// Adds both types to the module; -1 with an exception set if that fails.
int add_copy_types(PyObject* module);
