"""The local store: archives under names and tags in one folder, shared by many processes.

Start in store.py; gc.py and leases.py decide what is deleted, fsck.py checks what is there.
"""
