"""What travels between kvd, its engines and other kvds: frames, attach messages, gate pages.

Everything here is data and codecs; both sides import it, and it imports nothing of either.
"""
