"""LoRA: checkpoints of adapters to and from files (`dit.lora`), alone or merged into the weights.

checkpoints  checkpoint -> a folder for Diffusers, peft and ComfyUI, or whole weights; and back
commands     export-lora and import-lora of the command line
"""
