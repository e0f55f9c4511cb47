"""Write the tables and plots of ``diffuplug eval``."""
