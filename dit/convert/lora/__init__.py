"""LoRA: checkpoints of adapters to and from files, alone or merged into the weights.

stored      the adapters of a checkpoint, by Diffusers' modules; a checkpoint of adapters written
merged      weights with the products of adapters added, read one tensor at a time
export      checkpoint of adapters -> a folder for Diffusers, peft and ComfyUI
import_     file of adapters -> a checkpoint of adapters
commands    export-lora and import-lora of the command line
"""
