"""What runs on the target: one small program, standard library only (libtmux for the tmux launcher alone).

It is shipped as a zipapp named by its sha256 and speaks the protocol of `wire`. Nothing here may import
fabric, paramiko, pydantic or torch.
"""
