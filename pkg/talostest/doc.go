// Package talostest simulates Talos machines in-process for tests, benchmarks and the demo.
//
// A client that works with these machines is expected to work with Talos v1.13. Each machine has a COSI state with the resource types that
// talos-ccm reads behind the real COSI gRPC service, an apid with mutual TLS on port 50000 of its own loopback address, and optionally a
// machine.sock whose callers name their roles in metadata. Authorization follows Talos: the rules of machined for methods, the access
// policy of its resource API for resources, and roles from the Organization of the client certificate.
//
// The methods of [Machine] change machines and inject faults while clients are connected.
//
// Limitations: machines run no controllers, so resources change only when a test changes them; machine.sock does not check the process ID
// of callers; apid forwards calls to a single node only, and without a network connection. Outside of the process, the package only binds
// loopback addresses and creates sockets in its own directory. Linux allows binding all addresses of 127.0.0.0/8; other systems allow only
// 127.0.0.1.
package talostest
