// An HTTP server whose rate is known: it answers `rate` requests a second, one after the other, or each at once if the
// rate is 0. `answer PORT RATE`; it prints "ready", and parses no more of a request than its length.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MOST 4096
#define SIZE 65536

static const char ANSWER[] =
    "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 15\r\n\r\n{\"outputs\": []}";
static char *buffers[MOST];
static size_t filled[MOST];
static int queue[MOST], first, last;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

// Return whether the buffer of a connection holds a whole request, and empty it.
static int complete(int fd) {
    buffers[fd][filled[fd]] = 0;
    char *end = strstr(buffers[fd], "\r\n\r\n"), *length = strcasestr(buffers[fd], "content-length:");
    if (!end) return 0;
    size_t body = length && length < end ? strtoul(length + 15, NULL, 10) : 0;
    if (filled[fd] < (size_t)(end - buffers[fd]) + 4 + body) return 0;
    filled[fd] = 0;
    return 1;
}

static void answer(int fd) {
    if (send(fd, ANSWER, sizeof ANSWER - 1, MSG_NOSIGNAL) < 0) close(fd);
}

int main(int count, char **arguments) {
    if (count != 3) return fprintf(stderr, "answer PORT RATE\n"), 2;
    double rate = atof(arguments[2]), due = 0;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(arguments[1]))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0), poll = epoll_create1(0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 1024)) return perror("bind"), 1;
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener}, events[256];
    epoll_ctl(poll, EPOLL_CTL_ADD, listener, &event);
    prctl(PR_SET_TIMERSLACK, 1);
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        int waiting = first != last;
        struct timespec wait = {0};
        if (waiting && due > now()) wait.tv_nsec = (long)((due - now()) * 1e9) % 1000000000;
        int found = epoll_pwait2(poll, events, 256, waiting ? &wait : NULL, NULL);
        for (int i = 0; i < found; i++) {
            int fd = events[i].data.fd;
            if (fd == listener) {
                int client = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
                if (client < 0 || client >= MOST) continue;
                setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                if (!buffers[client]) buffers[client] = malloc(SIZE + 1);
                filled[client] = 0;
                event.data.fd = client;
                epoll_ctl(poll, EPOLL_CTL_ADD, client, &event);
                continue;
            }
            ssize_t size = recv(fd, buffers[fd] + filled[fd], SIZE - filled[fd], 0);
            if (size <= 0 && !(size < 0 && errno == EAGAIN)) { close(fd); continue; }
            if (size > 0) filled[fd] += size;
            if (!complete(fd)) continue;
            if (rate == 0) { answer(fd); continue; }
            if (first == last && due < now()) due = now() + 1 / rate;
            queue[last] = fd;
            last = (last + 1) % MOST;
        }
        while (first != last && due <= now()) {
            answer(queue[first]);
            first = (first + 1) % MOST;
            due += 1 / rate;
        }
    }
}
