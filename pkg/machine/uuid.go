package machine

import (
	"regexp"
	"slices"
	"strings"
)

var uuidFormat = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// placeholders are the AMI sample, Supermicro's default and Dell's value without a service tag
// (https://github.com/systemd/systemd/issues/5236 and samples in dmidecode's issues). Each is listed in both byte
// orders, since the SMBIOS version decides which is printed (before 2.6, or 2.6 and later).
var placeholders = []string{
	"03000200-0400-0500-0006-000700080009", "00020003-0004-0005-0006-000700080009", // AMI
	"12345678-1234-5678-90ab-cddeefaabbcc", "78563412-3412-7856-90ab-cddeefaabbcc",
	"4c4c4544-0000-2010-8020-80c04f202020", "44454c4c-0000-1020-8020-80c04f202020", // Dell without a service tag
}

// UUID returns the SMBIOS UUID in lower case, or an empty string if it is missing, malformed or cannot identify the
// machine: some vendors leave it at one repeated byte, such as zero, or put the same sample on every board.
func (m Machine) UUID() string {
	uuid := strings.ToLower(strings.TrimSpace(m.System.UUID))
	digits := strings.ReplaceAll(uuid, "-", "")

	if !uuidFormat.MatchString(uuid) || digits == strings.Repeat(digits[:2], len(digits)/2) || slices.Contains(placeholders, uuid) {
		return ""
	}

	return uuid
}
