"""What every part uses: errors, checks, progress, processes, folders."""
