/* The kernel of kernel.py in C: counts float32 values in the bins of a table, without Python's lock.
 *
 * Only the stable interface of Python 3.11 is used, and values come through the buffer interface, so that one build
 * serves every later Python and every numpy.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum {
    CHUNK = 2048, /* values that both loops below go through in turn, few enough to stay in the nearest cache */
    LANES = 16    /* ends kept side by side, so that compilers use vector instructions */
};

static const uint64_t ONE = (uint64_t)1 << 40; /* counts are above this bit, sums below */

/* Widens the ends of each lane; a NaN changes neither. Zero times an infinity or a NaN makes `odd` NaN. */
static void widen(float *low, float *high, float *odd, const float *values, Py_ssize_t n)
{
    Py_ssize_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int k = 0; k < LANES; k++) {
            const float value = values[i + k];
            low[k] = value < low[k] ? value : low[k];
            high[k] = value > high[k] ? value : high[k];
            odd[k] += value * 0.0f;
        }
    for (; i < n; i++) {
        low[0] = values[i] < low[0] ? values[i] : low[0];
        high[0] = values[i] > high[0] ? values[i] : high[0];
        odd[0] += values[i] * 0.0f;
    }
}

static void count_one(uint64_t *column, const float *value, int shift)
{
    uint32_t pattern;
    memcpy(&pattern, value, sizeof pattern);
    column[2 * (size_t)(pattern >> shift)] += ONE | (pattern & (((uint32_t)1 << shift) - 1));
}

/* Counts in the two columns in turn, so that equal neighbours need not wait for each other. */
static void count(uint64_t *table, const float *values, Py_ssize_t n, int shift)
{
    Py_ssize_t i = 0;
    for (; i + 2 <= n; i += 2) {
        count_one(table, values + i, shift);
        count_one(table + 1, values + i + 1, shift);
    }
    if (i < n)
        count_one(table, values + i, shift);
}

static PyObject *fill(PyObject *module, PyObject *arguments)
{
    Py_buffer values, table;
    int shift;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*iw*:fill", &values, &shift, &table))
        return NULL;
    PyObject *result = NULL;
    if (shift < 1 || shift > 22 || table.len != (Py_ssize_t)16 << (32 - shift)) {
        PyErr_SetString(PyExc_ValueError, "fill: the table is not one for this shift");
    } else if (values.len % 4 || (uintptr_t)values.buf % 4) {
        PyErr_SetString(PyExc_ValueError, "fill: the values are not aligned float32");
    } else {
        float low[LANES], high[LANES], odd[LANES];
        const Py_ssize_t n = values.len / 4;
        Py_BEGIN_ALLOW_THREADS
        for (int k = 0; k < LANES; k++) {
            low[k] = (float)Py_HUGE_VAL;
            high[k] = (float)-Py_HUGE_VAL;
            odd[k] = 0.0f;
        }
        for (Py_ssize_t start = 0; start < n; start += CHUNK) {
            const float *part = (const float *)values.buf + start;
            const Py_ssize_t size = n - start < CHUNK ? n - start : CHUNK;
            widen(low, high, odd, part, size);
            count(table.buf, part, size, shift);
        }
        for (int k = 1; k < LANES; k++) {
            low[0] = low[k] < low[0] ? low[k] : low[0];
            high[0] = high[k] > high[0] ? high[k] : high[0];
            odd[0] += odd[k];
        }
        Py_END_ALLOW_THREADS
        result = Py_BuildValue("ddN", (double)low[0], (double)high[0], PyBool_FromLong(odd[0] == 0.0f));
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&table);
    return result;
}

static PyMethodDef methods[] = {
    {"fill", fill, METH_VARARGS, "fill(values, shift, table): see graphquant.sketch.kernel.in_numpy."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_fill",
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__fill(void)
{
    return PyModuleDef_Init(&module);
}
