#ifndef TOKEN_SUMS_H
#define TOKEN_SUMS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

PyObject *token_sums(PyObject *module, PyObject *args);

#define TOKEN_SUMS_DOC "token_sums(address, samples, tokens, width, sample_stride, token_stride, block, whole, target): sums over the tokens of float32 numbers, of blocks or of whole samples."

#endif
