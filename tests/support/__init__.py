"""What the tests and the demo share: real file systems on loop devices, private servers, write load, requirements."""
