"""Files of pictures and videos -> pixels, and their captions.

clips            a planned sample, the clip that is read for it, and the interface of sources
captions         captions from files beside a medium, from tables, or from its file name
name_matching    files that belong to media by their names, in either spelling of é
signatures       first bytes of a file -> what it is in truth
images           image file -> upright pixels, and RGB of them
truncation       whether a video file is as long as its container says
video_packets    packets of a video file: times and key frames, before anything is decoded
frame_pictures   a decoded frame -> an upright picture, with its transparency
videos           video file -> times of its frames; frames -> upright pictures
frame_selection  times of the frames -> the frames that are kept
decoders         the library that decodes kept frames: PyAV or torchcodec
resizing         size of a picture -> size that is encoded
"""
