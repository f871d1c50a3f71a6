package nodespec

import (
	"fmt"
	"net/netip"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"

	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// Platforms without an instance identity of their own, by Talos's names
// (siderolabs/talos internal/app/machined/pkg/runtime/v1alpha1/platform).
const (
	platformMetal     = "metal"     // instanceId is the SMBIOS UUID (metal.go), valid and unique or not
	platformContainer = "container" // only a hostname and a SKU (container.go)
	platformNoCloud   = "nocloud"   // instance-id is optional, and so is the whole data source (nocloud.go)
	platformVMware    = "vmware"    // guestinfo is optional; the configuration is published in any case (vmware_supported.go)
)

// providerID follows the order: the one that rules or the platform give; the instance id that rules or the platform give; the SMBIOS UUID;
// the node IP. The second result says why none can be given: whatever is returned first stays for the Node's life, so that a rule that
// fails to replace an identity must not be made up for by what comes next in the order.
func providerID(in Input, transformed rules.Result, nodeIP netip.Addr) (id, pending string) {
	if pending := misruled(in, transformed); pending != "" {
		return "", pending
	}

	meta := transformed.Platform
	_, instanceReplaced := transformed.Replaced[fieldInstanceID]

	switch {
	case namesInstance(meta.ProviderID):
		return meta.ProviderID, ""
	case meta.InstanceID != "" && (instanceReplaced || !knownBySMBIOS(meta.Platform)):
		return providerURI(meta.Platform, meta.InstanceID), ""
	default:
		return machineID(in, nodeIP), ""
	}
}

// Fields of the metadata that identify the machine, as transform names them.
const (
	fieldProviderID = "ProviderID"
	fieldInstanceID = "InstanceID"
)

// misruled says what is wrong with the identity that rules have made, or nothing.
func misruled(in Input, transformed rules.Result) string {
	_, providerID := transformed.Replaced[fieldProviderID]
	_, instanceID := transformed.Replaced[fieldInstanceID]

	for _, p := range transformed.Problems {
		// An identity that rules make may be made of metadata that an earlier rule was to replace.
		if p.Identity || ((providerID || instanceID) && strings.HasPrefix(p.Key, "platformMetadata[")) {
			return fmt.Sprintf("rule %q cannot set %s: %s", p.Rule, p.Key, p.Why)
		}
	}

	for _, field := range []struct {
		name, value string
		names       bool
	}{
		{fieldProviderID, transformed.Platform.ProviderID, namesInstance(transformed.Platform.ProviderID)},
		{fieldInstanceID, transformed.Platform.InstanceID, transformed.Platform.InstanceID != ""},
	} {
		rule, replaced := transformed.Replaced[field.name]
		if !replaced {
			continue
		}

		if noSMBIOSYet(in) {
			return fmt.Sprintf("rule %q may make the %s from an SMBIOS that is yet to be read", rule, field.name)
		}

		if !field.names {
			return fmt.Sprintf("rule %q makes %s %q, which names no instance", rule, field.name, field.value)
		}

		if why := unusable(field.value); why != "" {
			return fmt.Sprintf("rule %q makes an %s that cannot be right: it %s", rule, field.name, why)
		}
	}

	return ""
}

func knownBySMBIOS(platform string) bool {
	return platform == platformMetal || platform == platformContainer
}

// premature says what keeps the machine from being identified now, or nothing.
func premature(in Input) string {
	meta := in.Machine.Platform
	named := meta.InstanceID != "" || namesInstance(meta.ProviderID)

	switch {
	case meta.Platform == "":
		return "the machine has not published its platform yet"
	case knownBySMBIOS(meta.Platform):
		if awaitsSMBIOS(in) {
			return fmt.Sprintf("platform %q has an SMBIOS UUID that is yet to be read", meta.Platform)
		}
	case awaitsConfirmation(in):
		return fmt.Sprintf("platform %q has not confirmed in this boot what Talos remembers of an earlier one", meta.Platform)
	case named:
		if why := unusable(meta.InstanceID + meta.ProviderID); why != "" {
			return fmt.Sprintf("platform %q has published an identity that cannot be right: it %s", meta.Platform, why)
		}
	case meta.Platform != platformNoCloud && meta.Platform != platformVMware:
		return fmt.Sprintf("platform %q has not published an instance ID yet", meta.Platform)
	case awaitsMetadata(in):
		return fmt.Sprintf("platform %q has not published its metadata yet", meta.Platform)
	}

	return ""
}

// unusable says what keeps an identity from being written where it stays for ever, or nothing. Those of nocloud are free text.
func unusable(identity string) string {
	const longest = 1024 // an Azure resource ID takes some 200

	odd := func(r rune) bool { return !unicode.IsGraphic(r) || unicode.IsSpace(r) || r == utf8.RuneError }

	switch {
	case len(identity) > longest:
		return fmt.Sprintf("is longer than %d bytes", longest)
	case strings.ContainsFunc(identity, odd):
		return "has spaces, control characters or broken UTF-8 in it"
	default:
		return ""
	}
}

// namesInstance tells a providerID from the bare format that Talos publishes when the metadata lacks the instance's ID, such as
// "openstack:///" without any data source, or "aws:///eu-1a/".
func namesInstance(providerID string) bool {
	return providerID != "" && !strings.HasSuffix(providerID, "/")
}

// machineID identifies a machine whose platform does not.
func machineID(in Input, nodeIP netip.Addr) string {
	uuid := in.Machine.UUID()
	if uuid == "" || in.SharedUUID || in.Options.ProviderIDFromNodeIP {
		return providerURI(in.Machine.Platform.Platform, nodeIP.String())
	}

	return providerURI(in.Machine.Platform.Platform, uuid)
}

func providerURI(platform, id string) string { return "talos://" + platform + "/" + id }

// awaitsConfirmation tells whether the metadata is from an earlier boot, when the disk may have been another instance's, and the platform
// will still say what it is now. A nocloud machine whose drive is gone hears no more.
func awaitsConfirmation(in Input) bool {
	if in.Machine.Platform.Platform == platformNoCloud && in.Machine.Stage == runtime.MachineStageRunning {
		return in.Machine.PlatformFromCache && hasNetworkSeed(in.Machine.System.SerialNumber)
	}

	return in.Machine.PlatformFromCache
}

// awaitsSMBIOS tells whether the metadata has the UUID already that we have yet to read from SMBIOS: the one is watched and the other
// polled.
func awaitsSMBIOS(in Input) bool {
	return in.Machine.Platform.InstanceID != "" && in.Machine.System == (hardware.SystemInformationSpec{})
}

// noSMBIOSYet tells whether SMBIOS may still be read. It is there long before a machine runs, and is polled together with the stage.
func noSMBIOSYet(in Input) bool {
	return in.Machine.System == (hardware.SystemInformationSpec{}) && in.Machine.Stage != runtime.MachineStageRunning
}

// awaitsMetadata tells whether metadata may still come on a platform where it is optional. A nocloud machine without any
// data source never publishes a configuration (NetworkConfiguration returns without one); it is then settled
// once the machine runs, unless SMBIOS names a data source on the network, which is asked until it answers.
func awaitsMetadata(in Input) bool {
	if in.Machine.PlatformPublished {
		return false
	}

	if in.Machine.Platform.Platform != platformNoCloud {
		return true
	}

	return in.Machine.Stage != runtime.MachineStageRunning || hasNetworkSeed(in.Machine.System.SerialNumber)
}

// hasNetworkSeed tells whether Talos asks the network for nocloud metadata rather than a drive, as it reads the serial number:
// "ds=nocloud-net;s=http://10.0.0.254/" (nocloud/metadata.go).
func hasNetworkSeed(serial string) bool {
	var network, http bool

	for option := range strings.SplitSeq(serial, ";") {
		switch key, value, _ := strings.Cut(option, "="); key {
		case "ds":
			network = network || value == "nocloud-net"
		case "s":
			http = http || strings.HasPrefix(strings.ToLower(value), "http")
		}
	}

	return network && http
}
