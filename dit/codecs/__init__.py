"""Codecs (VAEs), text encoders and sound codecs, for data preparation and generation.

vae/             codecs: videos and pictures -> whitened latents -> pictures
text/            text encoders: captions -> embeddings
sound/           sound of files -> waveforms in step with their frames
picture_colours  an open picture file -> the ICC profile of the colours that it declares
icc_profiles     codes of colours -> ICC profile -> sRGB
rgb              pictures of any mode -> 8-bit RGB; the size of reference pictures
frame_pictures   frames of an open video -> upright pictures, with their transparency
normalization    latents of zero mean and unit variance per channel, and back
pretrained       models of Diffusers and Transformers, loaded once in each process
encoder_options  the options of codecs and text encoders on the command line, without torch
dataset_encoder  the interface that codecs and text encoders share, and tables of them by name
rehearsal        random encoders in a folder, to try a pipeline without a download
dataset_card     `dataset_card.json`: what a dataset holds, and how to rebuild its encoders
"""
