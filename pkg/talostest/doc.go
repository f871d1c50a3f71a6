// Package talostest runs any number of Talos machines inside one process, for tests, the demo and benchmarks.
//
// A client that works with these machines is meant to work with Talos v1.13: each machine has a COSI state with the real resource
// types behind the real COSI gRPC service, an apid with mutual TLS on its own loopback address, port 50000, and, where asked for, a
// machine.sock whose callers name their roles in metadata. Who may call what follows Talos: the rules of machined for methods, the
// access policy of its resource API for resources, and roles from the client certificate's Organization.
//
// Machines can be changed and hurt while clients are connected: see the methods of [Machine].
//
// What it never does: it runs no controllers, so a resource changes only when a test changes it (the address helpers keep the
// NodeAddress resources in step, nothing else is derived); it authorizes nobody by process ID on machine.sock; it forwards no
// request to another machine; and it does nothing outside the process but bind loopback addresses and create sockets in its own folder.
// Binding the addresses of 127.0.0.0/8 needs no setup on Linux; other systems refuse all but 127.0.0.1.
package talostest
