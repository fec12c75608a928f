/* SPDX-License-Identifier: Apache-2.0 */
/* error.c - writes the text of an error. */
#include "base.h"

#include <stdarg.h>
#include <stdio.h>

KlStatus
kl_error_set(KlError *error, KlStatus status, const char *format, ...)
{
    if (error != NULL) {
        va_list arguments;
        va_start(arguments, format);
        (void)vsnprintf(error->text, sizeof(error->text), format, arguments);
        va_end(arguments);
        error->status = status;
    }
    return status;
}
