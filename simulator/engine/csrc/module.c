/* The compiled half of the event engine: the loops of graph.py, engine.py, replicas.py and contention.py, for float64 times.
 *
 * Every function does exactly what a plain Python path does, in the same order of operations, so both give the same bits; tests hold
 * them together. Arrays come in as buffers that the Python side (kernel.py) has given their type and length. Nothing here raises for a
 * schedule that is wrong: a function then answers nonzero, and the plain path finds the words.
 * Only the stable ABI of Python 3.11 is used, so one build serves every later Python.
 */
#include "kernel.h"

/* Of the functions' arguments. kernel.py takes no build of another version, such as one left behind by an update of the sources. */
#define VERSION 6

static PyMethodDef methods[] = {
    {"resolve", kernel_resolve, METH_VARARGS, "0 when the waits of every action were written, else 1: the schedule lacks something."},
    {"settle", kernel_settle, METH_VARARGS, "0 when start and end of every action were written, else 1: actions wait in a circle."},
    {"settle_columns", kernel_settle_columns, METH_VARARGS, "settle with a row of times per action, one per replica."},
    {"settle_shared", kernel_settle_shared, METH_VARARGS, "settle where transfers share the bandwidth of links."},
    {"uncontended_until", kernel_uncontended_until, METH_VARARGS, "Seconds before which no link of a run is too full."},
    {NULL, NULL, 0, NULL},
};

static int add_version(PyObject *module) { return PyModule_AddIntConstant(module, "VERSION", VERSION); }

static PyModuleDef_Slot slots[] = {{Py_mod_exec, add_version}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_kernel", "Compiled loops of the event engine; see kernel.py.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModuleDef_Init(&module); }
