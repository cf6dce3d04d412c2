/* A load generator that checks every answer: HTTP/1.1 and gRPC, closed loop with pipelining or open loop (Poisson).
 *
 *   load PORT http|grpc SAMPLES SECONDS CONNECTIONS DEPTH RATE DEADLINE_MS CANCEL SEED
 *
 * RATE 0 is a closed loop: each connection keeps DEPTH requests in flight. Otherwise requests are due at the times of
 * a Poisson process of RATE a second, and latencies count from then. CANCEL is the share of requests that the client
 * gives up: by RST_STREAM, or by closing the connection. SAMPLES is written by generator.py: for each request a kind
 * ('g': its answer must contain the mark; 'b': it must be refused as bad), the bytes and the mark; for gRPC, the first
 * one is the header block of all calls. Results are one line of JSON. Each request that was sent is counted once:
 *   right, wrong, refused (429, 503, 504, or a call that fails), denied (another status from 400 to 499, though the
 *   request is good), rejected (bad ones, as due), cut (the connection ended), silent (no answer within 10 s of the end), abandoned (given up by us). */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef struct { uint8_t kind; uint32_t size, mark_size; uint8_t *bytes, *mark; } Sample;
typedef struct { uint32_t sample, stream, got; double due; uint8_t *data; } Pending;
typedef struct {
    int fd, open, leaving;
    uint8_t *in, *out;
    size_t in_size, in_room, out_from, out_size, out_room, unacknowledged;
    Pending *pending;
    int first, count;  /* of http: a ring; of grpc: `count` entries in any order */
    uint32_t stream;
    int64_t window;
    double retry;
} Connection;

enum { BUCKETS = 4000, LARGEST = 1 << 16 };
static Sample *samples, header;
static uint32_t sample_count, next_sample;
static Connection *connections;
static int connection_count, depth, grpc, port, poller, idle_count, *idle;
static double rate, cancel, deadline, start;
static uint64_t due_count, sent, right, good, wrong, refused, denied, rejected, cut, silent, abandoned, reconnects;
static uint64_t histogram[BUCKETS], state;
static double latest, *backlog;
static size_t backlog_from, backlog_to, backlog_room;
static char example[400];

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static double uniform(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return ((state >> 11) + 0.5) / 9007199254740992.0;
}

static void *reserve(void *at, size_t *room, size_t wanted) {
    while (*room < wanted) *room = *room ? 2 * *room : 1 << 14;
    return realloc(at, *room);
}

static void put(Connection *c, const void *bytes, size_t size) {
    if (c->out_size + size > c->out_room) c->out = reserve(c->out, &c->out_room, c->out_size + size);
    memcpy(c->out + c->out_size, bytes, size);
    c->out_size += size;
}

static void put_frame(Connection *c, int kind, int flags, uint32_t stream, const void *bytes, size_t size) {
    uint8_t head[9] = {size >> 16, size >> 8, size, kind, flags, stream >> 24, stream >> 16, stream >> 8, stream};
    put(c, head, 9);
    put(c, bytes, size);
}

static void fail(const uint8_t *text, size_t size, const char *why) {
    wrong++;
    if (!*example) {
        int at = snprintf(example, 100, "%s: ", why);
        for (size_t i = 0; i < size && at < (int)sizeof example - 1; i++)
            example[at++] = text[i] >= 32 && text[i] < 127 && text[i] != '"' && text[i] != '\\' ? text[i] : '.';
    }
}

static void ended(Pending *p) {
    double took = now() - p->due;
    int bucket = took <= 1e-5 ? 0 : (int)(log(took / 1e-5) / log(1.005));
    histogram[bucket < BUCKETS ? bucket : BUCKETS - 1]++;
    right++;
    if (took <= deadline) good++;
}

static void free_slot(Connection *c) {
    if (rate > 0 && c->open && !c->leaving) idle[idle_count++] = c - connections;
}

static void lost(Connection *c, int ours) {
    *(ours ? &abandoned : &cut) += c->count;
    c->count = c->first = 0;
    if (c->fd >= 0) close(c->fd);
    c->fd = -1, c->open = 0, c->leaving = 0;
    for (int i = 0; i < idle_count; i++)
        if (idle[i] == c - connections) idle[i--] = idle[--idle_count];
    c->retry = now() + (ours ? 0 : 0.02);
    reconnects++;
}

static void flush(Connection *c) {
    while (c->open && c->out_from < c->out_size) {
        ssize_t done = send(c->fd, c->out + c->out_from, c->out_size - c->out_from, MSG_NOSIGNAL);
        if (done < 0) {
            if (errno != EAGAIN) lost(c, 0);
            return;
        }
        c->out_from += done;
    }
    c->out_from = c->out_size = 0;
}

static void ask(Connection *c, double due) {
    Sample *s = &samples[next_sample];
    Pending *p = &c->pending[grpc ? c->count : (c->first + c->count) % depth];
    p->sample = next_sample, p->due = due, p->got = 0;
    next_sample = (next_sample + 1) % sample_count;
    c->count++, sent++;
    int give_up = cancel > 0 && uniform() < cancel;
    if (!grpc) {
        put(c, s->bytes, s->size);
        if (give_up) {
            flush(c);
            if (c->open) lost(c, 1);
        }
        return;
    }
    p->stream = c->stream, c->stream += 2;
    put_frame(c, 1, 4, p->stream, header.bytes, header.size);
    put_frame(c, 0, 1, p->stream, s->bytes, s->size);
    c->window -= s->size;
    if (give_up) {
        uint8_t code[4] = {0, 0, 0, 8};
        put_frame(c, 3, 0, p->stream, code, 4);
        c->count--, abandoned++;
        free_slot(c);
    }
}

static void begin(Connection *c) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    int one = 1;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    c->in_size = c->out_from = c->out_size = c->unacknowledged = 0;
    if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&to, sizeof to)) {
        if (c->fd >= 0) close(c->fd);
        c->fd = -1, c->retry = now() + 0.02;
        return;
    }
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    c->open = 1, c->stream = 1, c->window = 65535;
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLET, .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &event);
    if (grpc) {
        put(c, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 24);
        put_frame(c, 4, 0, 0, (uint8_t[]){0, 4, 0, 16, 0, 0}, 6);  /* a window of 1 MiB for each stream */
        put_frame(c, 8, 0, 0, (uint8_t[]){63, 255, 0, 0}, 4);
    }
    if (rate > 0) free_slot(c);
    flush(c);
}

static void answered_http(Connection *c, int status, const uint8_t *body, size_t size) {
    if (!c->count) { fail(body, size, "an answer to nothing"); return; }
    Pending *p = &c->pending[c->first];
    Sample *s = &samples[p->sample];
    c->first = (c->first + 1) % depth, c->count--;
    if (status == 429 || status == 503 || status == 504) refused++;
    else if (s->kind == 'b') {
        if (status >= 400 && status < 500) rejected++;
        else fail(body, size, "a bad request is answered");
    } else if (status == 200 && memmem(body, size, s->mark, s->mark_size)) ended(p);
    else if (status >= 400 && status < 500) denied++;
    else fail(body, size, status == 200 ? "another answer" : "another status");
    free_slot(c);
}

static void read_http(Connection *c) {
    size_t at = 0;
    while (c->open) {
        uint8_t *head = c->in + at, *end = memmem(head, c->in_size - at, "\r\n\r\n", 4);
        if (!end) break;
        size_t length = 0;
        for (uint8_t *line = head; line && line < end; line = memmem(line + 2, end - line, "\r\n", 2)) {
            if (!strncasecmp((char *)line + 2, "content-length:", 15)) length = strtoull((char *)line + 17, NULL, 10);
        }
        if (end + 4 + length > c->in + c->in_size) break;
        at = end + 4 + length - c->in;
        answered_http(c, atoi((char *)head + 9), end + 4, length);
    }
    memmove(c->in, c->in + at, c->in_size -= at);
}

static void answered_grpc(Connection *c, int index, int reset) {
    Pending done = c->pending[index];
    Sample *s = &samples[done.sample];
    c->pending[index] = c->pending[--c->count];
    c->pending[c->count].data = done.data;  /* buffers stay with the slots */
    if (!done.got) { if (s->kind == 'b' && !reset) rejected++; else refused++; }
    else if (s->kind == 'b') fail(done.data, done.got, "a bad call is answered");
    else if (memmem(done.data, done.got, s->mark, s->mark_size)) ended(&done);
    else fail(done.data, done.got, "another answer");
    free_slot(c);
}

static void frame(Connection *c, int kind, int flags, uint32_t stream, uint8_t *bytes, size_t size) {
    if (kind == 4 && !(flags & 1)) put_frame(c, 4, 1, 0, "", 0);
    if (kind == 6 && !(flags & 1)) put_frame(c, 6, 1, 0, bytes, size);
    if (kind == 7) c->leaving = 1;
    if (kind == 8 && !stream) c->window += (uint32_t)bytes[0] << 24 | bytes[1] << 16 | bytes[2] << 8 | bytes[3];
    if (kind == 0 && (c->unacknowledged += size) > 1 << 20) {
        uint32_t by = htonl(c->unacknowledged);
        put_frame(c, 8, 0, 0, &by, 4);
        c->unacknowledged = 0;
    }
    if (kind != 0 && kind != 1 && kind != 3) return;
    for (int i = 0; i < c->count; i++) {
        Pending *p = &c->pending[i];
        if (p->stream != stream) continue;
        if (kind == 0 && p->got + size <= LARGEST) {
            memcpy(p->data + p->got, bytes, size);
            p->got += size;
        }
        if (kind == 3 || flags & 1) answered_grpc(c, i, kind == 3);
        return;
    }
}

static void read_grpc(Connection *c) {
    size_t at = 0;
    while (c->open && c->in_size - at >= 9) {
        uint8_t *head = c->in + at;
        size_t size = head[0] << 16 | head[1] << 8 | head[2];
        if (c->in_size - at < 9 + size) break;
        uint32_t stream = (uint32_t)(head[5] & 127) << 24 | head[6] << 16 | head[7] << 8 | head[8];
        frame(c, head[3], head[4], stream, head + 9, size);
        at += 9 + size;
    }
    memmove(c->in, c->in + at, c->in_size -= at);
}

static void receive(Connection *c) {
    while (c->open) {
        if (c->in_room - c->in_size < 1 << 16) c->in = reserve(c->in, &c->in_room, c->in_size + (1 << 17));
        ssize_t got = recv(c->fd, c->in + c->in_size, c->in_room - c->in_size, 0);
        if (got < 0 && errno == EAGAIN) return;
        if (got <= 0) { lost(c, 0); return; }
        c->in_size += got;
        (grpc ? read_grpc : read_http)(c);
    }
}

static void refill(Connection *c, double until) {
    if (!c->open && c->retry && now() > c->retry && now() < until) begin(c);
    if (c->leaving && !c->count) lost(c, 1);
    double at = now();
    while (rate <= 0 && c->open && !c->leaving && c->count < depth && at < until && (!grpc || c->window > LARGEST / 2)) {
        due_count++;
        ask(c, at);
    }
    flush(c);
}

static double offer(double next, double until) {
    double at = now();
    for (; next <= at && next < until; next -= log(uniform()) / rate) {
        if (backlog_to == backlog_room) {
            size_t bytes = backlog_room * sizeof *backlog;
            backlog = reserve(backlog, &bytes, bytes + sizeof *backlog), backlog_room = bytes / sizeof *backlog;
        }
        backlog[backlog_to++] = next;
        due_count++;
    }
    while (backlog_from < backlog_to && idle_count) {
        Connection *c = &connections[idle[--idle_count]];
        double due = backlog[backlog_from++];
        if (at - due > latest) latest = at - due;
        ask(c, due);
        flush(c);
    }
    return next;
}

static double quantile(double share) {
    uint64_t total = 0, wanted = (uint64_t)(share * right);
    for (int i = 0; i < BUCKETS; i++)
        if ((total += histogram[i]) > wanted) return 1e3 * 1e-5 * pow(1.005, i + 0.5);
    return 0;
}

static uint8_t *load(FILE *file, uint32_t *size) {
    if (fread(size, 4, 1, file) != 1) exit(2);
    uint8_t *bytes = malloc(*size + 1);
    if (*size && fread(bytes, *size, 1, file) != 1) exit(2);
    return bytes;
}

static void read_samples(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) exit(2);
    int kind;
    while ((kind = getc(file)) != EOF) {
        Sample s = {.kind = kind};
        s.bytes = load(file, &s.size), s.mark = load(file, &s.mark_size);
        if (kind == 'h') { header = s; continue; }
        samples = realloc(samples, (sample_count + 1) * sizeof s);
        samples[sample_count++] = s;
    }
}

int main(int count, char **given) {
    if (count != 11) return 2;
    port = atoi(given[1]), grpc = !strcmp(given[2], "grpc");
    read_samples(given[3]);
    double seconds = atof(given[4]);
    connection_count = atoi(given[5]), depth = atoi(given[6]);
    rate = atof(given[7]), deadline = atof(given[8]) / 1e3, cancel = atof(given[9]);
    state = 88172645463325252ull + 7919 * strtoull(given[10], NULL, 10);
    next_sample = state % sample_count;
    poller = epoll_create1(0);
    connections = calloc(connection_count, sizeof *connections);
    idle = calloc((size_t)connection_count * 4, sizeof *idle);
    if (rate > 0) depth = 1;
    start = now();
    for (int i = 0; i < connection_count; i++) {
        Connection *c = &connections[i];
        c->pending = calloc(depth + 1, sizeof *c->pending), c->retry = 1e-9;
        for (int j = 0; grpc && j <= depth; j++) c->pending[j].data = malloc(LARGEST);
        begin(c);
    }
    double until = now() + seconds, next = now(), checked = 0, began = now();
    struct epoll_event events[256];
    for (;;) {
        double at = now();
        int waiting = 0;
        if (at > until)
            for (int i = 0; i < connection_count; i++) waiting += connections[i].count;
        if (at > until && (!waiting || at > until + 10)) break;
        if (rate > 0) next = offer(next, until);
        double pause = rate > 0 && next < until ? next - now() : 0.01;
        int found = epoll_wait(poller, events, 256, pause < 0.001 ? 0 : pause > 0.01 ? 10 : (int)(1e3 * pause));
        for (int i = 0; i < found; i++) {
            Connection *c = events[i].data.ptr;
            if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(c);
            refill(c, until);
        }
        if (at > checked + 0.01)  /* connections that were lost, and those whose windows were shut */
            for (int i = 0; (checked = at) && i < connection_count; i++) refill(&connections[i], until);
    }
    double took = now() - began;
    for (int i = 0; i < connection_count; i++) silent += connections[i].count;
    uint64_t unsent = backlog_to - backlog_from;
    printf("{\"due\": %lu, \"sent\": %lu, \"right\": %lu, \"good\": %lu, \"wrong\": %lu, \"refused\": %lu, \"denied\": %lu, \"rejected\": %lu, "
           "\"cut\": %lu, \"silent\": %lu, \"abandoned\": %lu, \"unsent\": %lu, \"reconnects\": %lu, \"seconds\": %.3f, "
           "\"p50_ms\": %.3f, \"p99_ms\": %.3f, \"late_ms\": %.3f, \"example\": \"%s\"}\n",
           due_count, sent, right, good, wrong, refused, denied, rejected, cut, silent, abandoned, unsent, reconnects,
           took < seconds ? took : seconds, quantile(0.5), quantile(0.99), 1e3 * latest, example);
    return 0;
}
