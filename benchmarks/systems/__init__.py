"""Who is measured, in the order of the tables. One file for each library; a new one is named only here."""

from __future__ import annotations

from benchmarks.systems.bare import Bare, BareHashed, Copy, NicedWriter, Writer
from benchmarks.systems.base import System
from benchmarks.systems.dcp import OneThread, TwoThreads
from benchmarks.systems.flat import Flat, FlatFile
from benchmarks.systems.loaders import Fastsafetensors, RunaiStreamer
from benchmarks.systems.ours import Shardstore
from benchmarks.systems.s3_clients import Boto3, Boto3Managed, Connector, ConnectorDcp, Obstore, S3fs
from benchmarks.systems.safetensors_file import Safetensors, SafetensorsCloned
from benchmarks.systems.tensorizer_file import Tensorizer
from benchmarks.systems.torch_checkpointing_folder import TorchCheckpointing
from benchmarks.systems.torch_save import Torch, TorchMapped, TorchUnchecked

__all__ = ["SYSTEMS", "System"]

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        Shardstore(),
        Torch(),
        TorchUnchecked(),
        TorchMapped(),
        Safetensors(),
        SafetensorsCloned(),
        OneThread(),
        TwoThreads(),
        TorchCheckpointing(),
        Tensorizer(),
        Fastsafetensors(),
        RunaiStreamer(),
        Flat(),
        FlatFile(),
        Bare(),
        BareHashed(),
        Copy(),
        NicedWriter(),
        Writer(),
        S3fs(),
        Boto3Managed(),
        Boto3(),
        Obstore(),
        Connector(),
        ConnectorDcp(),
    )
}
