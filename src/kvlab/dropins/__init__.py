"""kvlab's codecs inside engines that other people run."""
