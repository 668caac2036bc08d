"""Receipts, parity and their verification."""
