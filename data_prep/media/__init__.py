"""Reads picture and video files, and their captions.

clips            a planned sample, the clip that is read for it, and the interface of sources
captions         captions from files beside a medium, from tables, or from its file name
name_matching    files that belong to media by their names, in either spelling of é
images           image file -> upright RGB pixels; the kind of a file by its first bytes
truncation       whether a video file is as long as its container says
video_packets    packets of a video file: times and key frames, before anything is decoded
video_looks      frames of a video -> shape and flaws of the first, and where the shape changes
videos           video file -> times of its frames; frames -> upright pictures, by two libraries
sounds           sound of a video -> the span of its samples' frames, or why there is none
frame_selection  times of the frames -> the frames that are kept
resizing         size of a picture -> size that is encoded
"""
