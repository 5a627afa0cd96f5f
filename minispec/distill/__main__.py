from minispec.distill import main

main()
