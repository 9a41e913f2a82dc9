"""The files of an exported folder, with tables for one device. They run there, and import nothing of autopar."""
