"""Why shardstore is not the first at a task, or misses a goal. Told only where that is so in the run at hand."""

from __future__ import annotations

ANY = ""  # state
NOTES: dict[tuple[str, str], str] = {
    ("gpt-124m", "save"): (
        "The bare calls themselves are little faster here than DCP with two threads: both copy at the speed of memory, "
        "and no writer could reach that ratio. Hashing, flushing and committing take a few percent more."
    ),
    ("gpt-124m", "save-durable"): (
        "The disk scatters more than the calls differ; shardstore flushes each file and its folder, and commits."
    ),
    ("gpt-124m", "load-into"): (
        "Of 0.109 s that a thread was watched, the reads took 0.073, hashing 0.011, opening, binding and looking at "
        "files 0.004, and the Python of 370 blocks, with waits for the interpreter's lock, the rest. The bare calls "
        "take 0.065 to 0.105 s for the same bytes: see the notes at the end of the page."
    ),
    (ANY, "load-fresh"): (
        "`runai`, `flat` and the bare calls hash nothing; `runai` and the bare calls put all tensors into one piece of "
        "memory, which stays as long as one tensor is used. shardstore gives each large tensor memory of its own, and "
        "hashes every byte: of 0.14 s that a thread was watched, reads and the first touch of new memory took 0.11, "
        "hashing 0.012, making the tensors 0.003, the Python of the blocks the rest."
    ),
    (ANY, "load-mapped"): (
        "`torch-mmap`, `safetensors` and `flat` return before they have read a tensor; shardstore has read and checked "
        "every byte. Of 0.080 s, hashing takes a thread 0.074 (the bare calls 0.075 in all); the rest is the index, "
        "headers, and binding. What hashes nothing need not wait for memory."
    ),
    (ANY, "open"): (
        "`safe_open` and `json.load` parse names, types and shapes; shardstore's index also says which bytes of which "
        "file have which digest, and is checked itself."
    ),
    (ANY, "partial"): (
        "The others move the wanted rows alone and check nothing. shardstore reads and hashes the blocks of 4 MiB that "
        "hold them: about twice the bytes here, and all of a file where rows of many small tensors are wanted."
    ),
    (ANY, "verify"): "shardstore hashes every byte twice, for its block and for its file, and checks headers.",
    (ANY, "stall"): (
        "A stall is one copy of the state; single goes took from 0.05 to 0.16 s, of the bare copy as of a save."
    ),
    (ANY, "stall-workers"): "As beside no workers: single goes of the copy scatter more than the two differ.",
    (ANY, "beside"): (
        "A thread at nice 19 takes 1.4 % of a core that is busy otherwise, by its weight (15 to 1024), and the steps "
        "wait for that core; shardstore has one such thread, as the bare writer. Goes scatter by 0.5 %."
    ),
    ("fsdp-2", "save"): (
        "Two ranks share two cores with all else: a plain run with a busy minute gave 1.26 times DCP, "
        "seven rounds right after it 1.71 times (0.29 to 0.31 s against 0.49 to 0.52 s)."
    ),
    (ANY, "convert"): (
        "shardstore reads back what it wrote, and holds one tensor for each thread; numpy holds the whole state."
    ),
    ("many-small", "load-into"): (
        "`flat` reads into one tensor after the other, in the order of the dict: it looks up no name, checks nothing. "
        "In a process that has loaded 100,000 tensors by DCP before, shardstore takes a quarter longer (0.47, then "
        "0.58 s): what it allocates is then scattered over the heap."
    ),
    (ANY, "fuse-save"): "The mount and its server bound everybody alike; shardstore hashes and commits besides.",
    (ANY, "fuse-load-into"): (
        "A file has one thread, since the mount reads ahead for one reader; shardstore hashes each block besides."
    ),
    (ANY, "fuse-load-fresh"): (
        "As above; and new memory is touched for the first time while the mount and its server use the same two cores."
    ),
    (ANY, "s3-save"): "The server takes most of the processor; all clients that send whole bodies are close together.",
    (ANY, "s3-load-into"): (
        "All clients wait for the same server; beside moving the bytes, shardstore hashes each of them and checks it."
    ),
    (ANY, "s3-load-fresh"): (
        "The bytes of `obstore` become tensors where they arrive; shardstore's are read into huge-page memory that is "
        "touched for the first time meanwhile."
    ),
    (ANY, "s3-paced-save"): (
        "Of what is lost, a third are requests that come one after another before the first part and after the last, "
        "a quarter the answers of the parts, and the rest the last round of parts, in which connections have nothing "
        "to do. Parts of 8 or 10 MiB gain less than their requests cost."
    ),
}
MISSING = "not explained yet"


def note(state: str, task: str) -> str:
    """The note on a task at a state."""
    return NOTES.get((state, task)) or NOTES.get((ANY, task)) or MISSING
