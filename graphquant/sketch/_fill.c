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

#ifdef __GNUC__
#define SOON(place) __builtin_prefetch(place)
#else
#define SOON(place) ((void)(place))
#endif

enum {
    CHUNK = 2048, /* values that both loops below go through in turn, few enough to stay in the nearest cache */
    LINE = 16,    /* values in a cache line */
    LANES = 32,   /* ends kept side by side; with 16, gcc 12 takes the loop over them apart and is half as fast */
    SPARE = 3     /* entries behind the last bin that are bin 0's too */
};

static const uint64_t ONE = (uint64_t)1 << 40; /* counts are above this bit, sums below */

/* Widens the ends of each lane; a NaN changes neither. */
static void widen(float *lows, float *highs, const float *values, Py_ssize_t n)
{
    float low[LANES], high[LANES]; /* of its own: no value can be one of them, as far as compilers know */
    memcpy(low, lows, sizeof low);
    memcpy(high, highs, sizeof high);
    Py_ssize_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int k = 0; k < LANES; k++) {
            const float value = values[i + k];
            low[k] = value < low[k] ? value : low[k];
            high[k] = value > high[k] ? value : high[k];
        }
    for (; i < n; i++) {
        low[0] = values[i] < low[0] ? values[i] : low[0];
        high[0] = values[i] > high[0] ? values[i] : high[0];
    }
    memcpy(lows, low, sizeof low);
    memcpy(highs, high, sizeof high);
}

/* Adds each value to the entry of its bin. Three of four zeros go to the spare entries, as an addition waits for the one
 * before to the same place, and zeros are many behind a ReLU. Meanwhile the next chunk comes from memory.
 */
static void count(uint64_t *table, const float *values, Py_ssize_t n, int shift)
{
    const uint32_t bins = (uint32_t)1 << (32 - shift), dropped = ((uint32_t)1 << shift) - 1;
    uint32_t pattern;
    Py_ssize_t i = 0;
    for (; i + LINE <= n; i += LINE) {
        SOON(values + i + CHUNK);
        for (int k = 0; k < LINE; k++) {
            memcpy(&pattern, values + i + k, sizeof pattern);
            uint32_t bin = pattern >> shift;
            if (k % (SPARE + 1))
                bin = bin ? bin : bins + k % (SPARE + 1) - 1;
            table[bin] += ONE | (pattern & dropped);
        }
    }
    for (; i < n; i++) {
        memcpy(&pattern, values + i, sizeof pattern);
        table[pattern >> shift] += ONE | (pattern & dropped);
    }
}

/* Whether no NaN or infinity was counted: their exponent, which is the largest, has no entries, whatever the sign. */
static int all_finite(const uint64_t *table, int shift)
{
    const size_t half = (size_t)1 << (31 - shift), largest = (size_t)1 << (23 - shift);
    uint64_t any = 0;
    for (size_t i = half - largest; i < half; i++)
        any |= table[i] | table[half + i];
    return !any;
}

static PyObject *fill(PyObject *module, PyObject *arguments)
{
    Py_buffer values, table;
    int shift;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*iw*:fill", &values, &shift, &table))
        return NULL;
    PyObject *result = NULL;
    if (shift < 1 || shift > 22 || table.len != (((Py_ssize_t)1 << (32 - shift)) + SPARE) * 8) {
        PyErr_SetString(PyExc_ValueError, "fill: the table is not one for this shift");
    } else if (values.len % 4 || (uintptr_t)values.buf % 4) {
        PyErr_SetString(PyExc_ValueError, "fill: the values are not aligned float32");
    } else {
        float low[LANES], high[LANES];
        int finite;
        const Py_ssize_t n = values.len / 4;
        Py_BEGIN_ALLOW_THREADS
        for (int k = 0; k < LANES; k++) {
            low[k] = (float)Py_HUGE_VAL;
            high[k] = (float)-Py_HUGE_VAL;
        }
        for (Py_ssize_t start = 0; start < n; start += CHUNK) {
            const float *part = (const float *)values.buf + start;
            const Py_ssize_t size = n - start < CHUNK ? n - start : CHUNK;
            widen(low, high, part, size);
            count(table.buf, part, size, shift);
        }
        for (int k = 1; k < LANES; k++) {
            low[0] = low[k] < low[0] ? low[k] : low[0];
            high[0] = high[k] > high[0] ? high[k] : high[0];
        }
        finite = all_finite(table.buf, shift);
        Py_END_ALLOW_THREADS
        result = Py_BuildValue("ddN", (double)low[0], (double)high[0], PyBool_FromLong(finite));
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
