"""Files of LoRA adapters: those of Diffusers, peft, ComfyUI and the original projects.

factors         A, B and alpha of one linear; whether adapters fit a network
original_names  names of modules in the original projects -> those of Diffusers
keys            what each key of a file is: module, factor; what is refused, and why
patterns        rank and alpha of a module by the rules of peft's adapter_config.json
read            a folder or file -> factors by Diffusers' names of modules
write           factors -> one folder for Diffusers, peft and ComfyUI

Nothing here builds a network or reads a checkpoint or knows of other processes.
"""

from dit.convert.lora.factors import LoraFactors, LoraFileError, check_fits, linear_shapes
from dit.convert.lora.read import read_lora
from dit.convert.lora.write import COMFYUI_FILE, write_lora

__all__ = [
    "COMFYUI_FILE",
    "LoraFactors",
    "LoraFileError",
    "check_fits",
    "linear_shapes",
    "read_lora",
    "write_lora",
]
