"""Who waits for whom: the board, deadlock reports, and the messages that a failed rank leaves. Moves no tensor."""
