"""Save, list, verify and load a checkpoint in a bucket: `python examples/s3.py s3://bucket/prefix [--endpoint URL]`.

Credentials come from the environment, as for every tool of S3 (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE).
"""

from __future__ import annotations

import argparse
import time

import torch

import shardstore


def main() -> None:
    """Do it, and say what happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="s3://bucket/prefix; the bucket must exist")
    parser.add_argument("--endpoint", help="of a service that is not AWS, such as http://127.0.0.1:8333")
    words = parser.parse_args()
    options = {"endpoint_url": words.endpoint} if words.endpoint else {}

    model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024))
    optimizer = torch.optim.AdamW(model.parameters())
    url = f"{words.url.rstrip('/')}/step-{int(time.time())}"

    saved = shardstore.save({"model": model, "optimizer": optimizer}, url, step=1, storage_options=options)
    print(f"saved {saved.nbytes:,} bytes to {saved.url} in {saved.seconds:.2f} s")

    with shardstore.open(url, storage_options=options) as checkpoint:
        for path, tensor in checkpoint.items():
            print(f"  {path}  {list(tensor.shape)}")
        print("first rows:", checkpoint["model/0.weight"][:2, :4].tolist())

    for found in shardstore.verify(words.url, storage_options=options).checkpoints:  # all that lie there
        print(f"  {found.url}  step {found.step}  {found.nbytes:,} bytes  {'whole' if found.ok else 'damaged'}")

    loaded = shardstore.load(url, only="model/*", storage_options=options)["model"]
    same = all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    print("loaded:", "equal to what was saved" if same else "different")


if __name__ == "__main__":
    main()
