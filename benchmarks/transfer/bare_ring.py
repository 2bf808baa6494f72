"""The least that shared memory costs: `python -m benchmarks.transfer.bare_ring`.

Two processes and a ring, no frames, leases or event loop: one copies pieces into the ring and digests them, the other
digests them there and copies them out. These are the passes over memory that the `shm` transport makes; what it takes
beyond them is its own. Prints the bandwidth beside that of one copy in one process.
"""

import mmap
import os
import resource
import socket
import statistics
import sys
import time

import numpy as np
import numpy.typing as npt
import xxhash

NUM_BYTES = 128 << 20
PIECE_BYTES = 2 << 20
NUM_SLOTS = 4
RING_BYTES = NUM_SLOTS * PIECE_BYTES
ROUNDS = 5
_NUM_PIECES = NUM_BYTES // PIECE_BYTES
_Bytes = npt.NDArray[np.uint8]


def _slot(ring: _Bytes, number: int) -> _Bytes:
    start = number % NUM_SLOTS * PIECE_BYTES
    return ring[start : start + PIECE_BYTES]


def _piece(memory: _Bytes, number: int) -> _Bytes:
    return memory[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]


def _receive(ring: _Bytes, target: _Bytes, connection: socket.socket) -> None:
    number = 0
    while number < _NUM_PIECES:
        arrived = connection.recv(4096)
        if not arrived:
            return  # the sender has died
        for _ in arrived:
            slot = _slot(ring, number)
            xxhash.xxh3_64_intdigest(slot.data)
            np.copyto(_piece(target, number), slot)
            connection.send(b".")
            number += 1


def _send(source: _Bytes, ring: _Bytes, connection: socket.socket) -> None:
    number = num_done = 0
    while num_done < _NUM_PIECES:
        while number < _NUM_PIECES and number - num_done < NUM_SLOTS:
            slot = _slot(ring, number)
            np.copyto(slot, _piece(source, number))
            xxhash.xxh3_64_intdigest(slot.data)
            connection.send(b".")
            number += 1
        num_done += len(connection.recv(4096))


def _serve(ring: _Bytes, connection: socket.socket) -> None:
    target = np.zeros(NUM_BYTES, np.uint8)
    for _ in range(ROUNDS + 1):
        _receive(ring, target, connection)


def main() -> None:
    """Measure and print."""
    ring = np.frombuffer(mmap.mmap(-1, RING_BYTES), np.uint8)
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        _serve(ring, theirs)
        os._exit(0)
    theirs.close()
    source = np.full(NUM_BYTES, 7, np.uint8)
    target = np.zeros_like(source)
    ring_s, copy_s = [], []
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        _send(source, ring, ours)
        ring_s.append(time.perf_counter() - started)
        started = time.perf_counter()
        np.copyto(target, source)
        copy_s.append(time.perf_counter() - started)
    os.wait()
    bare_s, memcpy_s = statistics.median(ring_s[1:]), statistics.median(copy_s[1:])  # the first touches memory
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    sys.stdout.write(
        f"memcpy {NUM_BYTES / memcpy_s / 1e9:.2f} GB/s, bare ring {NUM_BYTES / bare_s / 1e9:.2f} GB/s, "
        f"ratio {memcpy_s / bare_s:.3f}; the receiver was busy for "
        f"{(used.ru_utime + used.ru_stime) / (ROUNDS + 1) * 1e3:.1f} ms of each round\n"
    )


if __name__ == "__main__":
    main()
