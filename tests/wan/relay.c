/* A long line: two Ethernet devices of this machine, and what enters one leaves the other, later.

       relay NAME NAME DELAY_US LOSS_PPM SEED

   It makes both devices (TAP), says "ready" on standard output, and takes "DELAY_US LOSS_PPM\n" on standard input at any time;
   at that input's end it ends, and the devices vanish with it. Every frame waits DELAY_US, in the order of arrival, so a
   round trip takes twice that; one in a million times LOSS_PPM, drawn from SEED, is lost. Nothing else is done to a frame: TCP at both
   ends is the kernel's own. Rates are not its business: queueing disciplines on the devices bound them.

   While nothing is lost a frame may be a train of segments that the kernel has not cut yet, up to 64 KiB, as any network
   card takes it: a line of Gbit/s costs thousands of frames a second instead of a hundred thousand. A lost train would be a burst
   that no line has, so the kernel cuts them where frames are lost. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define FRAME_MAX (1 << 17)
#define HELD_MAX (512u << 20) /* bytes under way in one direction: 10 Gbit/s for 0.4 s; what is more is lost */
#define BURST 64              /* frames taken from one end before the other has its turn */

struct frame {
    struct frame *next;
    uint64_t due;
    size_t length;
    char bytes[];
};

struct direction {
    int from, to;
    struct frame *first, **last;
    size_t held;
};

static uint64_t delay_ns, loss_ppm, chance;

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int lost(void) { /* xorshift64*, Vigna 2016 */
    chance ^= chance >> 12;
    chance ^= chance << 25;
    chance ^= chance >> 27;
    return (chance * 2685821657736338717u >> 32) % 1000000 < loss_ppm;
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

/* Whether the kernel may leave trains of segments uncut. */
static void take_trains(int fd) {
    if (ioctl(fd, TUNSETOFFLOAD, loss_ppm ? 0 : TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6) < 0) die("TUNSETOFFLOAD");
}

static int device(const char *name) {
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    if (fd < 0) die("/dev/net/tun");
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    if (ioctl(fd, TUNSETIFF, &request) < 0) die(name);
    take_trains(fd);
    return fd;
}

/* Take what waits at one end. */
static void take(struct direction *d) {
    static char buffer[FRAME_MAX];
    for (int n = 0; n < BURST; n++) {
        ssize_t length = read(d->from, buffer, sizeof buffer);
        if (length < 0) {
            if (errno == EAGAIN || errno == EINTR) return;
            die("read");
        }
        if (d->held + (size_t)length > HELD_MAX || (loss_ppm && lost())) continue;
        struct frame *f = malloc(sizeof *f + (size_t)length);
        if (!f) die("malloc");
        f->next = NULL, f->due = now() + delay_ns, f->length = (size_t)length;
        memcpy(f->bytes, buffer, f->length);
        *d->last = f, d->last = &f->next, d->held += f->length;
    }
}

/* Let out what has waited long enough. A device that is down takes no frame: it is lost, as on a card without a cable. */
static void give(struct direction *d) {
    struct frame *f;
    while ((f = d->first) && f->due <= now()) {
        if (write(d->to, f->bytes, f->length) < 0 && errno == EAGAIN) return;
        d->first = f->next, d->held -= f->length;
        if (!d->first) d->last = &d->first;
        free(f);
    }
}

static void obey(int a, int b) {
    char line[64];
    ssize_t length = read(STDIN_FILENO, line, sizeof line - 1);
    unsigned long long delay_us, ppm;
    if (length <= 0) exit(0);
    line[length] = 0;
    if (sscanf(line, "%llu %llu", &delay_us, &ppm) == 2) delay_ns = delay_us * 1000, loss_ppm = ppm;
    take_trains(a), take_trains(b);
}

int main(int count, char **words) {
    if (count != 6) return 2;
    delay_ns = strtoull(words[3], NULL, 10) * 1000, loss_ppm = strtoull(words[4], NULL, 10);
    chance = strtoull(words[5], NULL, 10) | 1;
    int a = device(words[1]), b = device(words[2]);
    struct direction ways[2] = {{.from = a, .to = b}, {.from = b, .to = a}};
    ways[0].last = &ways[0].first, ways[1].last = &ways[1].first;
    prctl(PR_SET_TIMERSLACK, 1000UL);
    puts("ready");
    fflush(stdout);
    for (;;) {
        struct pollfd ends[3] = {{a, POLLIN, 0}, {b, POLLIN, 0}, {STDIN_FILENO, POLLIN, 0}};
        struct timespec wait, *until = NULL;
        uint64_t due = UINT64_MAX, at = now();
        for (int n = 0; n < 2; n++)
            if (ways[n].first && ways[n].first->due < due) due = ways[n].first->due;
        if (due != UINT64_MAX) {
            uint64_t left = due > at ? due - at : 0;
            wait.tv_sec = (time_t)(left / 1000000000u), wait.tv_nsec = (long)(left % 1000000000u), until = &wait;
        }
        if (ppoll(ends, 3, until, NULL) < 0 && errno != EINTR) die("ppoll");
        if (ends[2].revents) obey(a, b);
        for (int n = 0; n < 2; n++) take(&ways[n]), give(&ways[n]);
    }
}
