package csrpolicy

// Codes of reasons to ignore a request.
const (
	CodeOtherSigner   = "OtherSigner"    // not kubernetes.io/kubelet-serving
	CodeDecided       = "AlreadyDecided" // approved, denied, failed or issued
	CodeNodeUnmanaged = "NodeNotManaged" // the Node does not run Talos or is not selected by the configuration
	CodeExpired       = "Abandoned"      // no kubelet waits for it any longer
)

// CodeVerified is the code of the only reason to approve a request.
const CodeVerified = "IdentityVerified"

// Codes of reasons to defer a request.
const (
	CodeNodeUnknown         = "NodeUnknown"
	CodeMachineUnknown      = "MachineUnknown"
	CodeMachineUnreachable  = "MachineUnreachable"
	CodeMachineMismatch     = "IdentityMismatch"
	CodeClusterUnknown      = "ClusterIdentityIncomplete"
	CodeControlPlaneUnclear = "ControlPlaneUnconfirmed" // the API server's, and Node and machine do not both have the control-plane role
	CodeUnknownName         = "UnknownDNSName"          // not reported by the machine
	CodeUnknownAddress      = "UnknownIPAddress"        // not reported by the machine
	CodeExcludedAddress     = "ExcludedIPAddress"       // reported by the machine, and excluded from its node IPs
	CodeVirtualAddress      = "VirtualIPAddress"        // on a link for addresses that several machines share, and not the node IP
	CodeOwnedByOthers       = "OwnedByOtherMachine"
)

// Codes of reasons to deny a request.
const (
	CodeNoNode         = "RequesterNotNode"
	CodeGroups         = "InvalidGroups"
	CodeUsages         = "InvalidUsages"
	CodeExpiration     = "InvalidExpiration"
	CodeTooLarge       = "RequestTooLarge"
	CodeMalformed      = "MalformedRequest"
	CodeSubject        = "InvalidSubject"
	CodeKey            = "WeakKey"
	CodeSignature      = "BadSignature"
	CodeExtension      = "ForbiddenExtension" // an attribute or extension other than subjectAltName
	CodeNoSANs         = "NoSANs"
	CodeTooManySANs    = "TooManySANs"
	CodeForbiddenSAN   = "ForbiddenSANType" // neither a DNS name nor an IP address
	CodeWildcard       = "Wildcard"
	CodeInvalidName    = "InvalidDNSName"
	CodeAddressAsName  = "IPAddressAsDNSName"
	CodeClusterName    = "ClusterDNSName"
	CodeSpecialAddress = "SpecialIPAddress" // loopback, link-local, multicast, unspecified, broadcast
	CodeClusterAddress = "ClusterIPAddress"
	CodeOutdated       = "Outdated" // neither the machine nor its Node has it; the kubelet would request something else by now
)
