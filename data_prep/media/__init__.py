"""Files of pictures and videos -> pixels; captions.

captions         The captions of a medium: from files beside it, from tables, else from its own
clips            The values that sources deal in: a sample that is planned, and what was read fo
decoders         Which library decodes the frames of a video that are kept; the plan is always P
frame_selection  Which frames of a video are kept, decided from their times alone.
images           One image file -> upright RGB pixels.
resizing         From the size of a picture to the size that is encoded, in whole numbers throug
truncation       Whether a media file is as long as its boxes say.
video_packets    Packets of a video: what they say before a frame is decoded, and where decoding
videos           One video file -> when its frames are shown, and those frames upright in RGB.
"""
