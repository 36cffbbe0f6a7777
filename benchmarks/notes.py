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
        "Beside the bare calls, shardstore hashes every byte, and some 1,400 calls of Python take turns at the "
        "interpreter's lock; opening and binding take 2 ms. How fast the bare calls are depends on where in memory "
        "their file came to lie: see the notes at the end of the page."
    ),
    (ANY, "load-fresh"): (
        "`runai`, `flat` and the bare calls hash nothing; `runai` and the bare calls put all tensors into one piece of "
        "memory, which stays as long as one tensor is used. shardstore gives each large tensor memory of its own, and "
        "hashes every byte."
    ),
    (ANY, "load-mapped"): (
        "`torch-mmap`, `safetensors` and `flat` return before they have read a tensor; shardstore has read and checked "
        "every byte. Beside the bare calls it parses the index and compares a digest for each block."
    ),
    (ANY, "open"): (
        "`safe_open` and `json.load` parse names, types and shapes; shardstore's index also says which bytes of which "
        "file have which digest, and is checked itself."
    ),
    (ANY, "partial"): (
        "The others move the wanted rows alone and check nothing. shardstore reads and hashes the blocks of 4 MiB that "
        "hold them: about twice the bytes here, and all of a file where rows of many small tensors are wanted."
    ),
    (ANY, "convert"): (
        "shardstore reads back what it wrote, and holds one tensor for each thread; numpy holds the whole state."
    ),
    ("many-small", "load-into"): (
        "`flat` reads into one tensor after the other in the order of the dict; it looks up no name and checks nothing."
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
