"""A time of day that a test sets, for real processes, while they run. Time that passes is left as it is.

A shared library that is loaded before the C library answers for it with an offset, which lies in a file that every process
maps. (libfaketime 0.9.10 breaks Python's ``time.sleep`` where it leaves the monotonic clock alone.)
"""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

from tests.programs import required

SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long *offset_s;

__attribute__((constructor)) static void find(void) {
    const char *path = getenv("ATOLL_TEST_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) offset_s = mapped;
}

static long ahead(void) { return offset_s ? *offset_s : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += ahead();
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    (void)zone;
    struct timespec exact;
    int failed = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *there) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (there) *there = exact.tv_sec;
    return exact.tv_sec;
}
"""


class SettableClock:
    """Of all processes that are started with ``environment``."""

    def __init__(self, folder: Path) -> None:
        self._offset, source, library = folder / "offset", folder / "clock.c", folder / "clock.so"
        source.write_text(SOURCE)
        subprocess.run([required("gcc"), "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
        self.environment = {"LD_PRELOAD": str(library), "ATOLL_TEST_CLOCK": str(self._offset)}
        self._offset.write_bytes(struct.pack("l", 0))

    def set(self, ahead_s: int) -> None:
        """From now on the clock is ahead by so much of what it would be; behind, if negative."""
        file = os.open(self._offset, os.O_WRONLY)
        try:
            os.pwrite(file, struct.pack("l", ahead_s), 0)  # in place, where it is mapped
        finally:
            os.close(file)
