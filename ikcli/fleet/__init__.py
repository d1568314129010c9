"""Work that is divided into units: executors on one machine or many, and a journal of what is done."""
