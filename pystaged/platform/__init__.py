"""What the operating system gives: files, processes, memory."""
